"""What may be left out of what a server does not survive, so that only the cause is left.

Hypothesis would draw something smaller of the same kind; but a request that is right is long, and
it is in a request's members that the cause is to be told from what is only there besides.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from scripts.conformance.junk import Body, Sent
from scripts.conformance.places import places

_PIECES = (2, 4, 8, 16, 32)
"""Into how many pieces what is no JSON is cut, to leave one out."""
_MAX_SHOWN = 600


def smaller(sent: Sent) -> Iterator[Sent]:
    """Return what ``sent`` is when one thing is left out: whole frames first, then the outermost
    members, and inner ones at last."""
    for i in range(len(sent) if len(sent) > 1 else 0):
        yield [*sent[:i], *sent[i + 1 :]]
    for i, frame in enumerate(sent):
        for less in _smaller_frames(frame):
            yield [*sent[:i], less, *sent[i + 1 :]]


def _smaller_frames(frame: str | bytes | Body) -> Iterator[str | bytes | Body]:
    match frame:
        case Body(data, headers):
            if headers:
                yield Body(data)
            yield from (replace(frame, data=less) for less in _smaller_data(data))
        case str():
            yield from (less.decode() for less in _smaller_data(frame.encode()) if _is_text(less))
        case _:
            yield from _smaller_data(frame)


def _smaller_data(data: bytes) -> Iterator[bytes]:
    try:
        value, rest = _read(data)
        all_places = sorted(places(value), key=lambda place: place.depth)
    except (ValueError, RecursionError):
        yield from _without_pieces(data)
        return
    yield from (json.dumps(value).encode() + less for less in _without_pieces(rest))
    for place in all_places:
        less = deepcopy(value)
        place.remove_from(less)
        yield json.dumps(less).encode() + rest


def _read(data: bytes) -> tuple[Any, bytes]:
    """Return the value that ``data`` begins with, and what follows it.

    Raises:
        ValueError: it does not begin with JSON.
    """
    try:
        return json.loads(data), b""
    except json.JSONDecodeError:
        text = data.decode()
        value, end = json.JSONDecoder().raw_decode(text)
        return value, text[end:].encode()


def _without_pieces(data: bytes) -> Iterator[bytes]:
    for num_pieces in _PIECES:
        length = -(-len(data) // num_pieces)
        for start in range(0, len(data), length or 1):
            yield data[:start] + data[start + length :]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def shown(sent: Sent) -> str:
    """Return what was sent as a person may read it, on one line."""
    text = " then ".join(frame if isinstance(frame, str) else repr(frame) for frame in sent)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} … of {len(text):,} characters"
