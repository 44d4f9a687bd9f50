"""The streams among what a server sends: each event is put with its response, and all are judged.

On a WebSocket streams are told apart by their lanes, and acknowledgements by what they acknowledge.
"""

from collections.abc import Sequence

from protocol.codec import decode_object
from protocol.conformance.rules import NonconformityError, Rule, require
from protocol.conformance.server_sent_events import ServerSentEvent, sent_events
from protocol.conformance.shapes import (
    TERMINAL_TYPES,
    Event,
    check_error,
    check_event,
    check_response,
    is_extension,
)
from protocol.conformance.stream_grammar import (
    check_end,
    check_stream,
    is_acknowledgement,
    target_of,
)
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
        told = [
            event["type"]
            for event in self._speaking.get(lane, ())
            if not is_acknowledgement(event) and not is_extension(event)
        ]
        is_at_rest = not told or told[-1] in _RESTS
        require(is_at_rest, Rule.LANE_ORDER, f"a new response after {told[-1:]} of another")

    def _new_stream(self, lane: str | None) -> list[Event]:
        self._speaking[lane] = []
        self._streams.append(self._speaking[lane])
        return self._speaking[lane]

    def _target_of(self, event: Event) -> list[Event]:
        """Return the stream of what ``event`` acknowledges; what fails need not have one."""
        target = target_of(event)
        for stream in self._streams:
            if stream[0].get("response", {}).get("id") == target:
                return stream
        is_failure = event["type"].endswith(".failed")
        require(is_failure, Rule.ACKNOWLEDGEMENTS, f"an acknowledgement of nothing: {event}")
        return []

    def judge(self, *, only_whole: bool = False) -> None:
        """Judge every stream: one that has not ended as the beginning of a right one.

        Args:
            only_whole: whether those that have not ended are left out.

        Raises:
            NonconformityError: by the grammar.
        """
        for stream in self._streams:
            is_whole = any(event["type"] in TERMINAL_TYPES for event in stream)
            if is_whole or not only_whole:
                check_stream(stream, is_whole=is_whole)


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


def events_in(body: bytes) -> list[Event]:
    """Return the events of an HTTP stream as far as it came. Each is right; their order may not be.

    Raises:
        NonconformityError: one of them is none, or lacks members.
    """
    events = [read_event(sent.data) for sent in sent_events(body) if not _is_done(sent)]
    for event in events:
        check_event(event)
    return events


def read_event_stream(body: bytes, *, judges_frames: bool = True) -> list[Event]:
    """Return the events of a whole HTTP stream, judged.

    Args:
        body: of the answer.
        judges_frames: whether the frames count too, or only what is in them. A server that frames
            wrongly does so always, and would fail whatever else it is asked.

    Raises:
        NonconformityError: by the framing, or by the grammar.
    """
    events = events_in(body)
    ends = bool(events) and events[-1]["type"] in TERMINAL_TYPES
    require(ends, Rule.ONE_TERMINAL, "the body ended without a terminal event")
    check_stream(events)
    if judges_frames:
        _check_frames(sent_events(body))
    return events


def _check_frames(sent: Sequence[ServerSentEvent]) -> None:
    """Check how events are framed, and that ``[DONE]``, bare, is the last of them and no other."""
    *events, last = sent
    for event in events:
        require(not _is_done(event), Rule.SSE_FRAMES, "a [DONE] that is not the last event")
        _check_frame(event)
    require(_is_done(last), Rule.SSE_FRAMES, f"the last event is no [DONE]: {last.data}")
    names = _framing(last)
    require(names == ["data"], Rule.SSE_FRAMES, f"lines {', '.join(names)} with [DONE]")


def _check_frame(sent: ServerSentEvent) -> None:
    names = _framing(sent)
    is_right = names == ["data", "event"]
    require(is_right, Rule.SSE_FRAMES, f"lines {', '.join(names)} with {sent.data!r}")
    (name,), kind = sent.values("event"), read_event(sent.data)["type"]
    require(kind == name, Rule.SSE_FRAMES, f"event line {name!r} and type {kind!r}")


def _framing(sent: ServerSentEvent) -> list[str]:
    # Of other fields, such as `retry`, Open Responses says nothing.
    return sorted(name for name, _ in sent.fields if name in ("event", "data", "id"))


def _is_done(sent: ServerSentEvent) -> bool:
    return sent.data.strip() == _DONE


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
