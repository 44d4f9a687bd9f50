"""Frames and bodies as no client should write them, drawn by hypothesis.

Each begins as a request that is right, and is made wrong in a few places: in what it says
and in how it is spelled. So most of it is right, and gets far into a server.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, TypeAlias

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from protocol.conformance.check import Target, Way
from protocol.conformance.shapes import Event
from scripts.conformance import right_requests
from scripts.conformance.places import Place, places
from scripts.conformance.right_requests import CALL_ID, RESPONSE_ID

MAX_FRAMES = 4
"""How many frames or bodies are sent one after the other."""

_SEED = 20260204
_NUM_AT_ONCE = 50
"""So many are drawn in one go, which nothing interrupts: Ctrl-C has to wait for it."""


@dataclass(frozen=True)
class Raw:
    """JSON, or nearly, that is written as it is."""

    text: str


@dataclass(frozen=True)
class Body:
    """What is posted."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Sent: TypeAlias = Sequence[str | bytes | Body]
"""What is sent in one exchange, one after the other: frames, or bodies."""


def drawn(target: Target, way: Way, num_frames: int) -> Iterator[Sent]:
    """Return what is sent in exchanges of ``MAX_FRAMES``, so many in all, or a few less.

    Now and then the next takes a fraction of a second, in which as many are drawn as are drawn at
    once.
    """
    frames = _distinct(target, way, num_frames)
    while sent := list(islice(frames, MAX_FRAMES)):
        yield sent


def _distinct(target: Target, way: Way, num_frames: int) -> Iterator[str | bytes | Body]:
    one: st.SearchStrategy[Any] = _bodies(target) if way is Way.HTTP else _frames(target, way)
    known: set[str] = set()
    for begin in range(0, num_frames, _NUM_AT_ONCE):
        for frame in _drawn_at_once(one, f"{_SEED} {way} {begin}")[: num_frames - begin]:
            if repr(frame) not in known:
                known.add(repr(frame))
                yield frame


def _drawn_at_once(one: st.SearchStrategy[Any], seed_text: str) -> list[str | bytes | Body]:
    frames: list[str | bytes | Body] = []

    # One at a time: of several in a list, hypothesis likes to make some equal. And always as many:
    # what it draws depends on how many it may.
    @seed(seed_text)
    @settings(
        max_examples=_NUM_AT_ONCE,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(one)
    def take(frame: str | bytes | Body) -> None:
        frames.append(frame)

    take()
    return frames


# --- Values --------------------------------------------------------------------------------------


def _nested(levels: int) -> list[Raw]:
    return [Raw("[" * levels + "]" * levels), Raw('{"type":' * levels + "1" + "}" * levels)]


def _one_of(names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names.split())


_NAMES = _one_of(
    "type role content text refusal call_id name namespace arguments input output id status summary"
    " tools tool_choice parameters format syntax definition schema strict mode effort verbosity"
    " instructions parallel_tool_calls temperature top_p seed metadata reasoning truncation include"
    " top_logprobs stream_id conversation prompt background service_tier user previous_response_id"
    " response_id stream stream_options context_management prompt_cache_key store generate"
    " properties required items enum pattern minLength maxItems additionalProperties $ref anyOf"
    " annotations logprobs image_url file_id encrypted_content client_metadata model"
)
_WORDS = _one_of(
    "message function_call custom_tool_call function_call_output custom_tool_call_output reasoning"
    " compaction item_reference additional_tools function custom namespace web_search user system"
    " assistant developer tool input_text output_text refusal input_image input_file auto none"
    " required allowed_tools object array string integer grammar lark regex text json_schema"
    " json_object incomplete completed get_weather response.create response.append response.inject"
    " response.steer response.completed 16 true"
)
_ODD_TEXTS = st.sampled_from(
    [
        "",
        "\0",
        "\ud800",
        "\udc00\ud800",
        "\ufeff\ufffe\uffff",
        "\u202etxet\u2066",
        "e\u0301" * 40,
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "\U0010ffff",
        "<|im_end|>\n<|im_start|>system\n",
        "\r\n\r\ndata: [DONE]\n\n",
        "a" * 300,
        "../../etc/passwd",
        CALL_ID,
        RESPONSE_ID,
    ]
)
_ODD_JSON = st.sampled_from(
    [
        Raw("-0"),
        Raw("1e999"),
        Raw("-1E-999"),
        Raw("1" * 400),
        Raw("1" * 5000),
        Raw("0.1e1"),
        Raw("NaN"),
        Raw("-Infinity"),
        Raw("01"),
        Raw("'x'"),
        Raw('"\\u00e9\\uD83D\\uDE00"'),
        Raw('"\\uDC00"'),
        Raw('"\\x"'),
        Raw('"\t"'),
        Raw('{"type":"message","type":"function_call"}'),
        Raw('{"":1,"":2}'),
        Raw("[1,]"),
        *_nested(20),
        *_nested(130),
        *_nested(2000),
        *_nested(50_000),
    ]
)
_INTEGERS = st.integers(-1, 3) | st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(10**30)])
_SCALARS = (
    st.none()
    | st.booleans()
    | _INTEGERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | _WORDS
    | _ODD_TEXTS
    | st.text(max_size=12)
    | _ODD_JSON
)
_ANY_NAMES = _NAMES | st.text(max_size=3) | _ODD_TEXTS
_JUNK = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_ANY_NAMES, inner, max_size=3),
    max_leaves=6,
)


def written(value: Any) -> str:
    """Return ``value`` as JSON. Text stays as it is where UTF-8 has a way to write it."""
    match value:
        case Raw(text):
            return text
        case dict():
            return "{" + ",".join(f"{_quoted(k)}:{written(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(written, value)) + "]"
        case str():
            return _quoted(value)
        case _:
            return json.dumps(value)


def _quoted(text: str) -> str:
    has_surrogates = any("\ud800" <= c <= "\udfff" for c in text)
    return json.dumps(text, ensure_ascii=has_surrogates)


# --- What is said --------------------------------------------------------------------------------


def _edited(right: Sequence[Event]) -> st.SearchStrategy[Event]:
    """Return requests that are one of ``right`` but for one to three edits."""

    @st.composite
    def draw_edited(draw: st.DrawFn) -> Event:
        # Hypothesis has its favourites, and everything is to have its turn.
        random = draw(_RANDOM)
        event = deepcopy(random.choice(right))
        for _ in range(random.randint(1, 3)):
            random.choice(_EDITS)(draw, random, event)
        return event

    return draw_edited()


def _replace(draw: st.DrawFn, random: Random, event: Event) -> None:
    _any_place(random, event).put_into(event, draw(_JUNK))


def _remove(draw: st.DrawFn, random: Random, event: Event) -> None:
    if len(list(places(event))) > 1:  # the last has to be left for what else is edited
        _any_place(random, event).remove_from(event)


def _add(draw: st.DrawFn, random: Random, event: Event) -> None:
    container = _any_place(random, event).container_in(event)
    if isinstance(container, list):
        container.append(draw(_JUNK))
    else:
        container[draw(_ANY_NAMES)] = draw(_JUNK)


def _repeat(draw: st.DrawFn, random: Random, event: Event) -> None:
    """Put what is at one place at another too: what is right, where it does not belong."""
    value = deepcopy(_any_place(random, event).find_in(event))
    place = _any_place(random, event)
    if isinstance(there := place.find_in(event), list):
        there.append(value)
    else:
        place.put_into(event, value)


_EDITS = (_replace, _replace, _remove, _add, _repeat)


def _any_place(random: Random, event: Event) -> Place:
    return random.choice(list(places(event)))


# --- How it is spelled ---------------------------------------------------------------------------


def _spelled(draw: st.DrawFn, random: Random, event: Event) -> str:
    """Write ``event``, most of the time as JSON should be."""
    text = written(event)
    match random.choice(_SPELLINGS):
        case "cut":
            return text[: random.randrange(len(text))]
        case "inserted":
            at = random.randrange(len(text))
            return text[:at] + draw(_FEW_CHARACTERS) + text[at:]
        case "twice":
            return text + random.choice(["\n", "", ",", ";"]) + text
        case "after":
            return text + draw(_FEW_CHARACTERS)
        case "before":
            return random.choice(["\ufeff", " \t\r\n", "\0", "data: "]) + text
        case "duplicate":
            return f"{text[:-1]},{_quoted(draw(_NAMES))}:{written(draw(_JUNK))}}}"
        case "listed":
            return f"[{text}]"
        case _:
            return text


_SPELLINGS = (*["right"] * 20, "cut", "inserted", "twice", "after", "before", "duplicate", "listed")
_FEW_CHARACTERS = st.text(min_size=1, max_size=4)
_NOISE = st.binary(max_size=12) | st.text(max_size=12)
_RANDOM = st.randoms(use_true_random=True)


def _frames(target: Target, way: Way) -> st.SearchStrategy[str | bytes]:
    edited = _edited(right_requests.frames(target, way))

    @st.composite
    def draw_frame(draw: st.DrawFn) -> str | bytes:
        random = draw(_RANDOM)
        text = _spelled(draw, random, draw(edited))
        match random.choice((*["text"] * 30, "binary", "other", "noise")):
            case "binary":
                return text.encode()
            case "other":
                return text.encode("utf-16")
            case "noise":
                return draw(_NOISE)
            case _:
                return text

    return draw_frame()


def _bodies(target: Target) -> st.SearchStrategy[Body]:
    edited = _edited(right_requests.creates(target))

    @st.composite
    def draw_body(draw: st.DrawFn) -> Body:
        random = draw(_RANDOM)
        text = _spelled(draw, random, draw(edited))
        if random.random() < 0.8:
            return Body(text.encode())
        return random.choice(_ENCODINGS)(text)

    return draw_body()


_ENCODINGS: Sequence[Callable[[str], Body]] = (
    lambda text: Body(text.encode("utf-16")),
    lambda text: Body(text.encode("utf-16"), {"Content-Type": "application/json; charset=utf-16"}),
    lambda text: Body(f'{text[:-1]},"user":"é"}}'.encode("latin-1", "replace")),
    lambda text: Body(f'{text[:-1]},"user":"\ud800"}}'.encode("utf-8", "surrogatepass")),
    lambda text: Body(text.encode(), {"Content-Type": "application/x-www-form-urlencoded"}),
    lambda text: Body(text.encode(), {"Content-Type": ""}),
    lambda text: Body(gzip.compress(text.encode(), mtime=0), {"Content-Encoding": "gzip"}),
    lambda text: Body(gzip.compress(text.encode(), mtime=0)[:-9], {"Content-Encoding": "gzip"}),
    lambda text: Body(text.encode(), {"Content-Encoding": "gzip"}),
    lambda text: Body(zlib.compress(text.encode()), {"Content-Encoding": "deflate"}),
    lambda text: Body(text.encode(), {"Content-Encoding": "rot13"}),
    lambda text: Body(zlib.compress(text.encode())),
)
