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

checks = Checks()

_TOOLS: Event = {"tools": [TOOL], "parallel_tool_calls": False}
_FIRM: Event = {"temperature": 0}
_WEATHER = "Oslo: 7 °C, утром дождь, 夕方は晴れ."


@checks.over(*Way, rule=Rule.SAME_CONTEXT, requests=5)
def whole_conversation_is_answered_alike(target: Target, way: Way) -> Scenario:
    """What is said after a call, without chance, is what is said to the whole conversation.

    That is told where its parts were told: a server that goes on from the tokens that it sampled
    may know them there only, and the same text can be other tokens.
    """
    first = yield from _told_in_parts(target, way, "first")
    second = yield from _told_in_parts(target, way, "second")
    if (first.call, first.said) != (second.call, second.said):
        raise NotSupportedError("the same is not answered alike twice, whatever the temperature")
    call = {**second.call, "call_id": second.call_id}
    said = yield from _told_whole(target, second.socket, call)

    expect(said == second.said, f"in parts it is answered with {second.said}, whole with {said}")


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=2)
def empty_output_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may be the empty string."""
    yield from _with_output(target, way, "")


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=2)
def output_of_any_script_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may hold any script, quotes, control characters, and surrogate pairs."""
    yield from _with_output(target, way, f'{_WEATHER} "☂"\t\\ \u0001 \U0001f327')


@checks.over(*Way, rule=Rule.ANY_OUTPUT, requests=2)
def listed_output_is_taken(target: Target, way: Way) -> Scenario:
    """The output of a call may be a list of parts."""
    parts = [{"type": "input_text", "text": text} for text in ("It is dry.", "It is 7 °C.")]
    yield from _with_output(target, way, parts)


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


def _told_in_parts(target: Target, way: Way, name: str) -> Steps[_Told]:
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
        asked = {"previous_response_id": first["id"], "input": [output(call, _WEATHER)]}
        last = yield from post(target, store=True, **asked, **_TOOLS, **_FIRM)
        echo = _only_call(first["output"])
        return _Told(None, call["call_id"], echo, _said(last["output"]))
    socket = yield from connect(target, way, name)
    called = yield from socket.call(**_FIRM)
    events = yield from _go_on(socket, way, called, called.outputs(_WEATHER), **_FIRM)
    echo = _only_call(_items(called.events))
    return _Told(socket, called.calls[0]["call_id"], echo, _said(_items(events)))


def _told_whole(target: Target, socket: Socket | None, call: Event) -> Steps[list[str]]:
    """Tell the conversation again, at once, and return what is said to it."""
    question = {"type": "message", "role": "user", "content": CALLING["input"]}
    told = {"input": [question, call, output(call, _WEATHER)], **_TOOLS, **_FIRM}
    if socket is None:
        return _said((yield from post(target, **told))["output"])
    return _said(_items((yield from socket.create(**told))))


def _with_output(target: Target, way: Way, told: Any) -> Steps[None]:
    """Have the model call, and require that it goes on when it is told this output."""
    if way is Way.HTTP:
        call = _the_call((yield from post(target, **CALLING))["output"])
        question = {"type": "message", "role": "user", "content": CALLING["input"]}
        echo = {"call_id": call["call_id"], **_only_call([call])}
        items = [question, echo, output(call, told)]
        response = yield from post(target, input=items, **_TOOLS)
    else:
        socket = yield from connect(target, way)
        called = yield from socket.call()
        outputs = [output(call, told) for call in called.calls]
        response = (yield from _go_on(socket, way, called, outputs))[-1]["response"]

    expect(response["status"] != "failed", f"the response fails: {response.get('error')}")


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
