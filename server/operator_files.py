"""The files that the operator names, each read once, before there is a model.

So what is wrong with one is told before a model is loaded, which may take minutes; and it may be a
pipe, of which nothing is left once it was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sampler.traces import Trace, read_traces
from server.access import ApiKeys
from server.model_routes import ModelRoutes
from server.prices import PriceError, Prices, parse_prices
from server.settings import Settings, SettingsError


@dataclass(frozen=True)
class OperatorFiles:
    """What was in the files that ``Settings`` name."""

    routes: ModelRoutes
    """What the names of models mean."""
    prices: Prices = field(default_factory=dict)
    """Of each configuration: its own, or that of the model which runs it."""
    keys: ApiKeys | None = None
    """The keys that are let in; None lets everyone in."""
    traces: Sequence[Trace] = ()
    """Those that requests may have replayed."""


def read_operator_files(settings: Settings, served: str) -> OperatorFiles:
    """Read what ``settings`` name, for a server of the model ``served``.

    Raises:
        ApiKeyFileError: the API keys cannot be read.
        ModelRoutesError: the file of models cannot be read, or makes no sense.
        PriceError: one of the prices in it is none.
        SettingsError: a file of traces cannot be read.
        TraceError: it does not hold traces.
    """
    routes = _routes(settings.models_file, served)
    return OperatorFiles(
        routes,
        _prices(settings.models_file, routes),
        ApiKeys.from_file(settings.api_key_file) if settings.api_key_file else None,
        [trace for path in settings.replay_files for trace in _traces(path)],
    )


def _routes(path: Path | None, served: str) -> ModelRoutes:
    return ModelRoutes([served]) if path is None else ModelRoutes.from_file(path, [served])


def _prices(path: Path | None, routes: ModelRoutes) -> Prices:
    try:
        prices = dict(parse_prices(routes.price_table))
    except PriceError as error:
        raise PriceError(f"{path}: {error}") from error
    for name in routes.names:
        if not routes.is_split(name):
            config = routes.resolve(name, None)
            if price := prices.get(config.name) or prices.get(config.model):
                prices[config.name] = price
    return prices


def _traces(path: Path) -> list[Trace]:
    try:
        return read_traces(path)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
