"""One conversation, with a call in its middle, in every way in which it can be told."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.conformance.actions import Manner, Scenario, Steps
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import post
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import (
    CALLING,
    CALLS,
    TOOL,
    Called,
    Socket,
    connect,
    output,
)
from protocol.conformance.steps import streamed

checks = Checks()

_TOOLS: Event = {"tools": [TOOL], "parallel_tool_calls": False}
_QUESTION: Event = {"type": "message", "role": "user", "content": CALLING["input"]}
_CALL: Event = {
    "type": "function_call",
    "call_id": "call_1",
    "name": TOOL["name"],
    "arguments": '{"city": "Oslo"}',
}
_FIRM: Event = {"temperature": 0}
_NUM_WORDS = 400
_PARTS = [{"type": "input_text", "text": "It is dry. Yes. " * (_NUM_WORDS // 8)} for _ in range(2)]
"""So long that the tokens that a response has read tell whether both were among them."""
_LEAST_LIMIT = 16
"""The least that hosted models allow."""
_FEW_TOKENS = 4
"""How many a letter may be, and fewer than it takes to say that there is an output."""
_WEATHER = "Oslo: 7 °C, утром дождь, 夕方は晴れ."


@checks.over(*Way, rule=Rule.SAME_CONTEXT, requests=5)
def whole_conversation_is_answered_alike(target: Target, way: Way) -> Scenario:
    """What is said after a call, without chance, is what is said to the whole conversation.

    That is told where its parts were told: a server that goes on from the tokens that it sampled
    may know them there only, and the same text can be other tokens.
    """
    yield from _expect_answered_alike(target, way, _WEATHER)


@checks.over(*Way, rule=Rule.SAME_CONTEXT, requests=5)
def empty_output_is_answered_alike(target: Target, way: Way) -> Scenario:
    """A call to which the output is empty is not left out where the conversation is in parts."""
    yield from _expect_answered_alike(target, way, "")


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.ANY_OUTPUT, requests=3)
def outputs_are_read(target: Target, way: Way) -> Scenario:
    """In a whole conversation each part of an output is read, and what has none is not left out."""
    empty = yield from _num_read(target, way, "")
    letter = yield from _num_read(target, way, "7")
    listed = yield from _num_read(target, way, _PARTS)

    message = f"an empty output makes {empty} tokens of input, and one of a letter {letter}"
    expect(0 <= letter - empty <= _FEW_TOKENS, message)
    message = f"{_NUM_WORDS} words in two parts make {listed} tokens of input, and none {empty}"
    expect(listed >= empty + _NUM_WORDS, message)


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=2)
def empty_output_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may be the empty string."""
    yield from _with_output(target, way, "")


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=2)
def output_of_any_script_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may hold any script, quotes, control characters, and surrogate pairs."""
    yield from _with_output(target, way, f'{_WEATHER} "☂"\t\\ \u0001 \U0001f327')


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=4)
def listed_output_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may be a list of parts, each of which is read."""
    empty = yield from _with_output(target, way, "", "first")
    listed = yield from _with_output(target, way, _PARTS, "second")

    # The model may have thought of more before the one call than before the other.
    least = empty["usage"]["input_tokens"] + _NUM_WORDS * 3 // 4
    num_read = listed["usage"]["input_tokens"]
    message = f"with {_NUM_WORDS} words in two parts, {num_read} tokens are read, and not {least}"
    expect(num_read >= least, message)


@checks.over(Way.CHAINED, rule=Rule.ECHOES, requests=2)
def echoed_call_is_no_other(target: Target, way: Way) -> Scenario:
    """A call that is repeated with its output, as Codex 0.99 does, is not there twice."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    (call, *_) = called.calls
    echo = {"call_id": call["call_id"], **_only_call([call])}
    events = yield from socket.follow(called.response, [echo, *called.outputs()], **_TOOLS)

    expect(events[-1]["type"] != "response.failed", "the continuation failed")


@checks.over(Way.CHAINED, Way.APPEND, Way.INJECT, rule=Rule.ABANDONMENT, requests=3)
def dropped_connection_is_forgotten(target: Target, way: Way) -> Scenario:
    """After a connection that was dropped at a call, another one comes to an answer."""
    first = yield from connect(target, way, "first")
    yield from first.call()
    yield from first.close(Manner.DROPPED)
    second = yield from connect(target, way, "second")
    called = yield from second.call()
    events = yield from _go_on(second, way, called, called.outputs())

    expect(events[-1]["type"] != "response.failed", "the response failed")


class _Told(NamedTuple):
    """What became of a conversation."""

    socket: Socket | None
    call_id: str
    call: Event
    """Without its ids."""
    said: list[str]


def _expect_answered_alike(target: Target, way: Way, told: str) -> Steps[None]:
    """Require that a conversation with this output is answered alike in parts and whole.

    Raises:
        NotSupportedError: it is not answered alike in parts, twice.
    """
    first = yield from _told_in_parts(target, way, told, "first")
    second = yield from _told_in_parts(target, way, told, "second")
    if (first.call, first.said) != (second.call, second.said):
        raise NotSupportedError("the same is not answered alike twice, whatever the temperature")
    call = {**second.call, "call_id": second.call_id}
    said = yield from _told_whole(target, second.socket, call, told)

    expect(said == second.said, f"in parts it is answered with {second.said}, whole with {said}")


def _told_in_parts(target: Target, way: Way, told: str, name: str) -> Steps[_Told]:
    """Have the model call, give it the output, and return what came of it.

    Raises:
        NotSupportedError: not just one call came, and then not just an answer, or what is to be
            followed is not stored.
    """
    if way is Way.HTTP:
        first = yield from post(target, store=True, **CALLING, **_FIRM)
        if first.get("store") is not True:
            raise NotSupportedError("the response says that it is not stored")
        call = _the_call(first["output"])
        asked = {"previous_response_id": first["id"], "input": [output(call, told)]}
        last = yield from post(target, store=True, **asked, **_TOOLS, **_FIRM)
        echo = _only_call(first["output"])
        return _Told(None, call["call_id"], echo, _said(last["output"]))
    socket = yield from connect(target, way, name)
    called = yield from socket.call(**_FIRM)
    events = yield from _go_on(socket, way, called, called.outputs(told), **_FIRM)
    echo = _only_call(_items(called.events))
    return _Told(socket, called.calls[0]["call_id"], echo, _said(_items(events)))


def _told_whole(target: Target, socket: Socket | None, call: Event, told: str) -> Steps[list[str]]:
    """Tell the conversation again, at once, and return what is said to it."""
    asked = {"input": [_QUESTION, call, output(call, told)], **_TOOLS, **_FIRM}
    if socket is None:
        return _said((yield from post(target, **asked))["output"])
    return _said(_items((yield from socket.create(**asked))))


def _num_read(target: Target, way: Way, told: Any) -> Steps[int]:
    """Tell a whole conversation with this output, and return how many tokens are read of it."""
    items = [_QUESTION, _CALL, output(_CALL, told)]
    asked = {"tools": [TOOL], "tool_choice": "none", "max_output_tokens": _LEAST_LIMIT}
    events = yield from streamed(target, way, input=items, **asked)
    response = events[-1]["response"]
    expect(response["status"] != "failed", f"the response fails: {response.get('error')}")
    num_tokens: int = response["usage"]["input_tokens"]
    return num_tokens


def _with_output(target: Target, way: Way, told: Any, name: str = "socket") -> Steps[Event]:
    """Have the model call, and return the response with which it goes on when it is told this
    output."""
    if way is Way.HTTP:
        call = _the_call((yield from post(target, **CALLING))["output"])
        echo = {"call_id": call["call_id"], **_only_call([call])}
        items = [_QUESTION, echo, output(call, told)]
        response = yield from post(target, input=items, **_TOOLS)
    else:
        socket = yield from connect(target, way, name)
        called = yield from socket.call()
        outputs = [output(call, told) for call in called.calls]
        response = (yield from _go_on(socket, way, called, outputs))[-1]["response"]

    expect(response["status"] != "failed", f"the response fails: {response.get('error')}")
    return response


def _go_on(
    socket: Socket, way: Way, called: Called, outputs: Sequence[Event], **members: Any
) -> Steps[list[Event]]:
    """Give the outputs in the manner of ``way``, and return what the model says to them."""
    match way:
        case Way.APPEND:
            return (yield from socket.append(*outputs))
        case Way.INJECT:
            return (yield from socket.inject(called.response_id, *outputs))
        case _:
            asked = {**_TOOLS, **members}
            return (yield from socket.follow(called.response, list(outputs), **asked))


def _items(events: Sequence[Event]) -> list[Event]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def _the_call(items: Sequence[Event]) -> Event:
    """Return the call among ``items``, which was required."""
    calls = [item for item in items if item["type"] in CALLS]
    expect(bool(calls), f"a call was required, and the output is {items}")
    return calls[0]


def _only_call(items: Sequence[Event]) -> Event:
    """Return the call that ``items`` are, as a client repeats it, but for its ``call_id``.

    Raises:
        NotSupportedError: they are something else.
    """
    if len(items) != 1:
        raise NotSupportedError("the model says more than the one call that is required")
    return {name: items[0][name] for name in ("type", "name", "arguments")}


def _said(items: Sequence[Event]) -> list[str]:
    """Return the texts that ``items`` are.

    Raises:
        NotSupportedError: there is a call among them.
    """
    if any(item["type"] in CALLS for item in items):
        raise NotSupportedError("the model calls again, whatever it is told")
    texts = [item["content"] for item in items if item["type"] == "message"]
    return [part.get("text", "") for parts in texts for part in parts]
