"""What the names of models mean: aliases, weighted splits and configurations, out of a TOML file.

A name is looked up among the served models and the configurations, then the aliases, then the
splits; ``fallback`` answers to a name that nobody knows. What a name leads to may be a name again,
so the file is read as a graph, and refused as a whole if a name in it leads nowhere or in a circle.

A split sends a conversation where the weighted hash of its sticky key is greatest (rendezvous
hashing). All its requests go the same way, in each process; and where weights change or a target is
added, only those conversations move that have to: a move costs a conversation its KV cache. For the
same reason what follows a response goes where that went.
"""

import math
import re
import secrets
import tomllib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from protocol import errors
from protocol.client_events import parse_create
from protocol.errors import ProtocolError
from protocol.validation import JsonObject

_KEYS = ("default", "fallback", "alias", "split", "model", "price")
_DEFAULTS = (
    "temperature",
    "top_p",
    "max_output_tokens",
    "presence_penalty",
    "frequency_penalty",
    "instructions",
    "reasoning",
    "truncation",
    "parallel_tool_calls",
    "text",
    "seed",
)
_NESTED = {"reasoning": ("effort", "summary"), "text": ("format", "verbosity")}
"""The members of those defaults that are objects: a request may have unknown ones, a file not."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")  # TOML 1.0, keys

_MAX_KEPT_CHARACTERS = 512


class ModelRoutesError(ValueError):
    """A file of models that cannot be used. The message is for the operator, and says where."""


@dataclass(frozen=True)
class ModelConfig:
    """What runs a request, and how."""

    requested: str
    """The model as the client named it, or the default's name."""
    name: str
    """Of the configuration: what the response says as its ``model``."""
    model: str
    """The served model that runs it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Members for requests that leave them out."""

    def applied_to(self, body: JsonObject) -> JsonObject:
        """Return ``body``, which stays as it is, with this model and the defaults that it lacks.

        A member is taken as a whole: a request with a ``text`` has nothing of the default's. Null
        counts as left out.
        """
        lacking = {key: value for key, value in self.defaults.items() if body.get(key) is None}
        return body | lacking | {"model": self.name}


@dataclass(frozen=True)
class _Split:
    """A name that stands for others, each for its share of the conversations."""

    name: str
    weights: Mapping[str, float]
    """Positive, by target."""

    def target(self, sticky: str | None) -> str:
        """Return where the conversation ``sticky`` goes; None goes anywhere, at random."""
        key = secrets.token_hex(16) if sticky is None else sticky
        return max(self.weights, key=lambda target: self._score(target, key))

    def _score(self, target: str, key: str) -> float:
        """Return a Gumbel variate around the logarithm of the weight: the greatest of several is
        each one's with a probability in proportion to its weight."""
        digest = blake2b("\0".join((self.name, target, key)).encode(), digest_size=8).digest()
        # 52 bits and a half: strictly between 0 and 1, and exact.
        uniform = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
        return math.log(self.weights[target]) - math.log(-math.log(uniform))


class ModelRoutes:
    """All names that a server answers to.

    Args:
        served: the names of the models that run here.
        table: what a file of models says; with nothing in it, served names mean themselves and
            others mean nothing.

    Raises:
        ModelRoutesError: ``table`` makes no sense; the message says where in it.
    """

    def __init__(self, served: Collection[str], table: Mapping[str, Any] | None = None) -> None:
        table = table or {}
        _check_keys(table, _KEYS, "")
        self._aliases = _aliases(_table(table, "alias"))
        self._splits = _splits(_table(table, "split"))
        self._configs = {name: ModelConfig(name, name, name) for name in served}
        configs = _configs(_table(table, "model"), served)
        _check_names_are_distinct(served, model=configs, alias=self._aliases, split=self._splits)
        self._configs |= configs
        self._default = _optional_name(table, "default")
        self._fallback = _optional_name(table, "fallback")
        self._check_targets()
        self._meanings = self._find_meanings()
        if self._default is None and len(served) == 1:
            (self._default,) = served
        self.price_table: Mapping[str, Any] = _table(table, "price")
        """The prices as they came: what they mean is not for routes to say."""
        self._check_prices()

    @classmethod
    def from_file(cls, path: Path, served: Collection[str]) -> "ModelRoutes":
        """Read a TOML file.

        Raises:
            ModelRoutesError: it cannot be read, or makes no sense; the message says where.
        """
        try:
            return cls(served, tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ModelRoutesError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ModelRoutesError(f"cannot read {path}: it is not a text file") from error
        except RecursionError as error:
            raise ModelRoutesError(f"{path}: it is nested too deeply") from error
        except ModelRoutesError as error:
            raise ModelRoutesError(f"{path}: {error}") from error
        except ValueError as error:  # of TOML, or of a number with too many digits
            message = str(error)
            raise ModelRoutesError(f"{path}: {message[:1].lower()}{message[1:]}") from error

    @property
    def names(self) -> list[str]:
        """All names but those that only the fallback answers to; served models come first."""
        return [*self._configs, *self._aliases, *self._splits]

    def resolve(
        self, name: str | None, sticky: str | None, parent: str | None = None
    ) -> ModelConfig:
        """Return what ``name`` means.

        Args:
            name: as the client says it; None is the default.
            sticky: what is the same in all requests of a conversation; None draws at random.
            parent: the configuration of the response that is followed, if one is. Where ``name``
                may mean it, it does.

        Raises:
            ProtocolError: nobody knows ``name``, or there is none and no default.
        """
        requested = self._default if name is None else name
        if not requested:
            raise errors.missing_required_parameter("model")
        if (found := self._known(requested)) is None:
            raise errors.model_not_found(requested)
        if parent is None or parent not in self._meanings[found]:
            return replace(self._configs[self._config_name(found, sticky)], requested=requested)
        return replace(self._configs[parent], requested=requested)

    def meanings(self, name: str | None) -> Collection[str]:
        """Return the configurations that ``name`` may mean: none if nobody knows it."""
        asked = self._default if name is None else name
        found = None if asked is None else self._known(asked)
        return () if found is None else self._meanings[found]

    def is_split(self, name: str | None) -> bool:
        """Tell whether what ``name`` means depends on the conversation."""
        return len(self.meanings(name)) > 1

    def _knows(self, name: str) -> bool:
        return name in self._configs or name in self._aliases or name in self._splits

    def _known(self, name: str) -> str | None:
        """Return ``name`` if it is known, else the fallback, if there is one."""
        return name if self._knows(name) else self._fallback

    def _config_name(self, name: str, sticky: str | None) -> str:
        while name not in self._configs:
            name = self._aliases.get(name) or self._splits[name].target(sticky)
        return name

    def _check_targets(self) -> None:
        for place, name in self._targets():
            if not self._knows(name):
                raise ModelRoutesError(
                    f"{place}: expected a name that is served or defined here, got {name!r}"
                )

    def _targets(self) -> Iterable[tuple[str, str]]:
        """Give each name that something leads to, with the place that says so."""
        for key, name in (("default", self._default), ("fallback", self._fallback)):
            if name is not None:
                yield key, name
        for alias, name in self._aliases.items():
            yield _path("alias", alias), name
        for split in self._splits.values():
            for name in split.weights:
                yield _path("split", split.name, name), name

    def _check_prices(self) -> None:
        """Refuse a price that no run would ever have."""
        for name in self.price_table:
            if name not in self._configs:
                raise ModelRoutesError(
                    f"{_path('price', name)}: expected the name of a served model or of one in the "
                    f"table 'model', got {name!r}"
                )

    def _find_meanings(self) -> Mapping[str, Collection[str]]:
        """Return for each name the configurations that it may mean.

        Raises:
            ModelRoutesError: some names lead to each other.
        """
        graph: dict[str, Collection[str]] = {alias: [to] for alias, to in self._aliases.items()}
        graph |= {name: split.weights for name, split in self._splits.items()}
        found = {name: frozenset([name]) for name in self._configs}
        try:
            for name in TopologicalSorter(graph).static_order():  # targets come first
                if name in graph:
                    found[name] = frozenset().union(*(found[target] for target in graph[name]))
        except CycleError as error:
            circle = " → ".join(repr(name) for name in reversed(error.args[1]))
            table = "alias" if error.args[1][-1] in self._aliases else "split"
            place = _path(table, error.args[1][-1])
            raise ModelRoutesError(f"{place}: expected a way to a model, got {circle}") from None
        return found


class ResolvedModels:
    """What names were found to mean, kept while they are in use.

    Drawing at random is no finding, so it is not kept. Nor is what a client spells at great length.

    Args:
        routes: finds what is not kept.
        max_kept: how much is kept; what was not asked for longest makes room.
        sticky: of the conversations that bring nothing of the kind; None draws each time.
    """

    def __init__(
        self, routes: ModelRoutes, max_kept: int = 1024, *, sticky: str | None = None
    ) -> None:
        self._routes = routes
        self._max_kept = max_kept
        self._sticky = sticky
        self._kept: OrderedDict[tuple[str | None, str | None], ModelConfig] = OrderedDict()
        self.num_hits = 0
        self.num_misses = 0

    def is_split(self, name: str | None) -> bool:
        """Tell whether what ``name`` means depends on the conversation."""
        return self._routes.is_split(name)

    def resolve(
        self, name: str | None, sticky: str | None, parent: str | None = None
    ) -> ModelConfig:
        """Return what ``name`` means in the conversation ``sticky``, as ``ModelRoutes`` does.

        Raises:
            ProtocolError: nobody knows ``name``, or there is none and no default.
        """
        is_split = self._routes.is_split(name)
        if is_split and parent in self._routes.meanings(name):
            self.num_hits += 1
            return self._routes.resolve(name, None, parent)
        sticky = sticky or self._sticky
        key = name, sticky if is_split else None
        if found := self._kept.get(key):
            self._kept.move_to_end(key)
            self.num_hits += 1
            return found
        self.num_misses += 1
        config = self._routes.resolve(name, sticky)
        is_drawn = is_split and sticky is None
        if not is_drawn and sum(len(part or "") for part in key) <= _MAX_KEPT_CHARACTERS:
            self._keep(key, config)
        return config

    def _keep(self, key: tuple[str | None, str | None], config: ModelConfig) -> None:
        self._kept[key] = config
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)


# --- The tables of a file ------------------------------------------------------------------------


def _path(*keys: str) -> str:
    """Return a dotted key as TOML writes it."""
    return ".".join(
        key if _BARE_KEY.fullmatch(key) else msgspec.json.encode(key).decode() for key in keys
    )


def _table(parent: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the table in ``parent`` whose path ends in ``keys``; none there is an empty one."""
    table = parent.get(keys[-1], {})
    if not isinstance(table, dict):
        raise ModelRoutesError(f"{_path(*keys)}: expected a table, got {table!r}")
    return table


def _check_keys(table: Mapping[str, Any], known: Collection[str], place: str) -> None:
    for key in table:
        if key not in known:
            raise ModelRoutesError(
                f"{place}{_path(key)}: unknown key, expected one of: {', '.join(known)}"
            )


def _name(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise ModelRoutesError(f"{place}: expected the name of a model, got {value!r}")
    return value


def _optional_name(table: Mapping[str, Any], key: str) -> str | None:
    return _name(table[key], key) if key in table else None


def _aliases(table: Mapping[str, Any]) -> dict[str, str]:
    return {alias: _name(name, _path("alias", alias)) for alias, name in table.items()}


def _splits(table: Mapping[str, Any]) -> dict[str, _Split]:
    return {name: _Split(name, _weights(_table(table, "split", name), name)) for name in table}


def _weights(table: Mapping[str, Any], name: str) -> dict[str, float]:
    if not table:
        raise ModelRoutesError(f"{_path('split', name)}: expected at least one name with a weight")
    for target, weight in table.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ModelRoutesError(
                f"{_path('split', name, target)}: expected a positive number, got {weight!r}"
            )
    return dict(table)


def _configs(table: Mapping[str, Any], served: Collection[str]) -> dict[str, ModelConfig]:
    return {name: _config(_table(table, "model", name), name, served) for name in table}


def _config(table: Mapping[str, Any], name: str, served: Collection[str]) -> ModelConfig:
    place = _path("model", name)
    _check_keys(table, ("of", *_DEFAULTS), f"{place}.")
    of = table.get("of")
    if not isinstance(of, str) or of not in served:
        expected = " or ".join(map(repr, sorted(served)))
        raise ModelRoutesError(
            f"{place}.of: expected the name of a served model ({expected}), got {of!r}"
        )
    defaults = {key: value for key, value in table.items() if key != "of"}
    for key, members in _NESTED.items():
        if isinstance(nested := defaults.get(key, {}), dict):
            _check_keys(nested, members, f"{place}.{key}.")
    _check_is_json(defaults, place)
    try:
        parse_create({"model": name, "input": "Hello"} | defaults, transport="http")
    except ProtocolError as error:
        raise ModelRoutesError(f"{place}: {error.message}") from error
    return ModelConfig(name, name, of, defaults)


def _check_is_json(value: object, place: str) -> None:
    """Refuse what TOML has and a request has not: dates, and numbers that are not finite."""
    match value:
        case dict():
            for key, member in value.items():
                _check_is_json(member, f"{place}.{_path(key)}")
        case list():
            for i, member in enumerate(value):
                _check_is_json(member, f"{place}[{i}]")
        case float() if not math.isfinite(value):
            raise ModelRoutesError(f"{place}: expected a finite number, got {value!r}")
        case str() | int() | float():
            pass
        case _:
            raise ModelRoutesError(f"{place}: expected a value that JSON has, got {value}")


def _check_names_are_distinct(served: Collection[str], **tables: Mapping[str, Any]) -> None:
    places = dict.fromkeys(served, "a served model")
    for table, names in tables.items():
        for name in names:
            place = _path(table, name)
            _name(name, place)
            if name in places:
                raise ModelRoutesError(
                    f"{place}: expected a name of its own, got that of {places[name]}"
                )
            places[name] = place
