"""The streams among what a server sends: each event is put with its response, and all are judged.

On a WebSocket streams are told apart by their lanes, and acknowledgements by what they acknowledge.
"""

from protocol.codec import decode_object
from protocol.conformance.rules import NonconformityError, Rule, require
from protocol.conformance.shapes import (
    TERMINAL_TYPES,
    Event,
    check_error,
    check_event,
    check_response,
)
from protocol.conformance.stream_grammar import check_end, check_stream, is_acknowledgement
from protocol.errors import ProtocolError

_DONE = "[DONE]"
_RESTS = (*TERMINAL_TYPES, "response.done", "response.output_item.done")


class CapturedSocket:
    """What came on one WebSocket."""

    def __init__(self) -> None:
        self._streams: list[list[Event]] = []
        self._speaking: dict[str | None, list[Event]] = {}  # the latest stream of each lane

    def take(self, data: str | bytes) -> Event | None:
        """Return the event in a frame; there is none in the ``[DONE]`` that some servers send.

        Raises:
            NonconformityError: it is none, or lacks members.
        """
        if data == _DONE:
            return None
        is_text = isinstance(data, str)
        require(is_text, Rule.FRAME_IS_JSON, "a binary frame")
        event = read_event(data)
        if event.get("type") == "error":
            check_error(event)
            return event
        check_event(event)
        self._stream_of(event).append(event)
        return event

    def _stream_of(self, event: Event) -> list[Event]:
        lane = event.get("stream_id")
        match event["type"].split("."):
            case ["response", "created"]:
                self._check_rest(lane)
                return self._new_stream(lane)
            case ["response", "steer" | "inject", _]:
                return self._target_of(event)
            case _ if lane in self._speaking:  # also after the end, which the grammar will not have
                return self._speaking[lane]
            case _:
                is_first = not self._speaking
                require(is_first, Rule.ONE_LANE, f"an event of the silent lane {lane}: {event}")
                return self._new_stream(lane)

    def _check_rest(self, lane: str | None) -> None:
        """Check that ``lane`` has ended what it says, or is suspended: then it may be given up."""
        told = [e["type"] for e in self._speaking.get(lane, ()) if not is_acknowledgement(e)]
        is_at_rest = not told or told[-1] in _RESTS
        require(is_at_rest, Rule.LANE_ORDER, f"a new response after {told[-1:]} of another")

    def _new_stream(self, lane: str | None) -> list[Event]:
        self._speaking[lane] = []
        self._streams.append(self._speaking[lane])
        return self._speaking[lane]

    def _target_of(self, event: Event) -> list[Event]:
        """Return the stream of what ``event`` acknowledges; what fails need not have one."""
        target = event.get("response_id") or event["steer"].get("previous_response_id")
        for stream in self._streams:
            if stream[0].get("response", {}).get("id") == target:
                return stream
        is_failure = event["type"].endswith(".failed")
        require(is_failure, Rule.ACKNOWLEDGEMENTS, f"an acknowledgement of nothing: {event}")
        return []

    def judge(self) -> None:
        """Judge every stream that ended.

        Raises:
            NonconformityError: by the grammar.
        """
        for stream in self._streams:
            if any(event["type"] in TERMINAL_TYPES for event in stream):
                check_stream(stream)


def read_event(data: str | bytes) -> Event:
    """Return the JSON object in ``data``.

    Raises:
        NonconformityError: there is none.
    """
    try:
        return decode_object(data)
    except ProtocolError as error:
        told = f"{error.message}; it begins with {data[:80]!r}"
        raise NonconformityError(told, Rule.FRAME_IS_JSON) from None


def read_event_stream(body: bytes, *, judges_frames: bool = True) -> list[Event]:
    """Return the events of a whole HTTP stream, judged.

    An ``error`` event may stand among them, before ``response.failed``.

    Args:
        body: of the answer.
        judges_frames: whether the frames count too, or only what is in them. A server that frames
            wrongly does so always, and would fail whatever else it is asked.

    Raises:
        NonconformityError: by the framing, or by the grammar.
    """
    blocks = [block for block in body.decode(errors="replace").split("\n\n") if block.strip()]
    read = _read_block if judges_frames else _read_data
    events = [event for block in blocks if (event := read(block)) is not None]
    for event in events:
        if event["type"] != "error":
            check_event(event)
    told = [event for event in events if event["type"] != "error"]
    ends = bool(told) and told[-1]["type"] in TERMINAL_TYPES
    require(ends, Rule.ONE_TERMINAL, "the body ended without a terminal event")
    check_stream(told)
    is_done = blocks[-1].strip() == f"data: {_DONE}" or not judges_frames
    require(is_done, Rule.SSE_FRAMES, f"the last block is no [DONE]: {blocks[-1]}")
    return events


def _fields(block: str) -> list[tuple[str, ...]]:
    lines = [line for line in block.splitlines() if not line.startswith(":")]  # comments are legal
    return [tuple(part.strip() for part in line.split(":", 1)) for line in lines]


def _read_data(block: str) -> Event | None:
    """Return the event in ``block``, whatever else is in it."""
    data = [field[1] for field in _fields(block) if field[0] == "data" and len(field) == 2]
    return read_event("\n".join(data)) if data and data != [_DONE] else None


def _read_block(block: str) -> Event | None:
    fields = _fields(block)
    if not fields or fields == [("data", _DONE)]:
        return None
    names = sorted(field[0] for field in fields)
    require(names == ["data", "event"], Rule.SSE_FRAMES, f"lines {', '.join(names)} in {block!r}")
    (name,), (data,) = ([f[1] for f in fields if f[0] == key] for key in ("event", "data"))
    event = read_event(data)
    is_right = event.get("type") == name
    require(is_right, Rule.SSE_FRAMES, f"event line {name!r} and type {event.get('type')!r}")
    return event


def read_response(body: bytes) -> Event:
    """Return the response that is the body of an answer, judged.

    Raises:
        NonconformityError: it lacks members, or contradicts itself.
    """
    response = read_event(body)
    check_response(response)
    if response["status"] not in ("queued", "in_progress"):
        check_end(response)
    return response
