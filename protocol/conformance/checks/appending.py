"""The append dialect: one response that is suspended at its calls."""

from typing import Any

from protocol.conformance.actions import Closed, Frame, Receive, Scenario, Steps
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import (
    BOTH,
    CALLING,
    TOOL,
    Called,
    Socket,
    connect,
    output,
)

checks = Checks()

_STRANGER = output({"type": "function_call", "call_id": "call_none"})


@checks.over(Way.APPEND, rule=Rule.APPEND_RESUMES, requests=2)
def output_resumes_the_response(target: Target, way: Way) -> Scenario:
    """An output that is appended resumes the response, which keeps its id and its items."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    events = yield from socket.append(*called.outputs())

    response = events[-1]["response"]
    expect(response["id"] == called.response_id, "it goes on under another id")
    kept = response["output"][: len(called.response["output"])]
    expect(kept == called.response["output"], "the items before the suspension have changed")


@checks.over(Way.APPEND, rule=Rule.SUSPENSION, requests=1)
def suspension_is_no_end(target: Target, way: Way) -> Scenario:
    """`response.done` says that the response is in progress, and nothing follows."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.quiet()

    status = called.response["status"]
    expect(status == "in_progress", f"a suspended response is {status}")


@checks.over(Way.APPEND, rule=Rule.SEGMENT_USAGE, requests=2)
def usage_is_of_the_segment(target: Target, way: Way) -> Scenario:
    """The usage of each closing event counts its own segment."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    events = yield from socket.append(*called.outputs())

    first, second = called.response["usage"], events[-1]["response"]["usage"]
    context = first["input_tokens"] + first["output_tokens"]
    is_right = context <= second["input_tokens"] < context + first["input_tokens"]
    expect(is_right, f"a segment of {second} follows one of {first}")


@checks.over(Way.APPEND, rule=Rule.APPEND_IN_ANY_ORDER, requests=3, responses=2)
def outputs_come_in_any_order(target: Target, way: Way) -> Scenario:
    """Outputs may come one by one, the last first; the response goes on when all are there."""
    socket = yield from connect(target, way)
    called = yield from socket.call(input=BOTH, parallel_tool_calls=None)
    if len(called.calls) == 1:
        raise NotSupportedError("the model made one call only")
    first, *others = called.outputs()
    yield from socket.send("response.append", input=others[::-1])
    yield from socket.quiet()
    events = yield from socket.append(first)

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.APPEND, rule=Rule.APPEND_ECHOES, requests=2)
def echoed_call_is_dropped(target: Target, way: Way) -> Scenario:
    """A call that is appended with its output, as Codex up to 0.99 does, is not there twice."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    (call, *_) = called.calls
    echo = {name: call[name] for name in ("type", "call_id", "name", "arguments")}
    events = yield from socket.append(echo, *called.outputs())

    found = [i["call_id"] for i in events[-1]["response"]["output"] if "call_id" in i]
    expect(found.count(call["call_id"]) == 1, f"the calls of the response are {found}")


@checks.over(Way.APPEND, rule=Rule.APPEND_RESUMES, requests=2)
def message_may_ride_along(target: Target, way: Way) -> Scenario:
    """A user message may be appended together with the outputs."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    message = {"type": "message", "role": "user", "content": "Be brief."}
    events = yield from socket.append(*called.outputs(), message)

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=2, responses=1)
def output_of_no_call_is_answered(target: Target, way: Way) -> Scenario:
    """An output of a call that was never made gets an error, or ends the connection."""
    socket = yield from connect(target, way)
    yield from socket.call()
    yield from socket.send("response.append", input=[_STRANGER])

    yield from _is_answered(socket)


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=3, responses=2)
def append_to_nothing_is_answered(target: Target, way: Way) -> Scenario:
    """An append when no response is suspended gets an error, or ends the connection."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    events = yield from socket.append(*called.outputs())
    if events[-1]["type"] == "response.done":
        raise NotSupportedError("the model calls again, whatever it is told")
    yield from socket.send("response.append", input=called.outputs())

    yield from _is_answered(socket)


def _is_answered(socket: Socket) -> Steps[None]:
    """Require an error frame or a close, which are the same to clients of the prototype."""
    came = yield Receive(socket.name)
    is_error = isinstance(came, dict) and came["type"] == "error"
    expect(is_error or isinstance(came, Closed), f"it is answered with {came}")
    assert not isinstance(came, Frame)


@checks.over(Way.APPEND, rule=Rule.CREATE_ABANDONS, requests=2)
def create_abandons_the_suspended_run(target: Target, way: Way) -> Scenario:
    """A create without parent while a run is suspended is answered as any other."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.send_create()
    created = (yield from socket.up_to("response.created"))[-1]["response"]
    events = yield from socket.segment()

    expect(created["id"] != called.response_id, "no new response was created")
    expect(events[-1]["response"]["id"] == created["id"], "another response ended in its place")


@checks.over(Way.APPEND, rule=Rule.APPEND_IN_ANY_ORDER, requests=2)
def parallel_outputs_come_together(target: Target, way: Way) -> Scenario:
    """The outputs of parallel calls may come in one append, the last first."""
    socket = yield from connect(target, way)
    called = yield from socket.call(input=BOTH, parallel_tool_calls=None)
    if len(called.calls) == 1:
        raise NotSupportedError("the model made one call only")
    events = yield from socket.append(*called.outputs()[::-1])

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.APPEND, rule=Rule.JUNK_TOLERANCE, requests=2)
def metadata_may_ride_along(target: Target, way: Way) -> Scenario:
    """An append may carry `client_metadata`, as those of Codex 0.105 to 0.107 do."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    metadata = {"x-codex-turn-metadata": '{"turn": 1}'}
    events = yield from socket.append(*called.outputs(), client_metadata=metadata)

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=3, responses=2)
def append_while_speaking_is_answered(target: Target, way: Way) -> Scenario:
    """An append for a run that was given up, while another is told, gets an error, or a close."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.send_create()
    yield from socket.up_to("response.created")
    yield from socket.send("response.append", input=called.outputs())

    yield from _is_answered_in_time(socket)


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=2, responses=1)
def output_given_twice_is_answered(target: Target, way: Way) -> Scenario:
    """An append with two outputs of one call gets an error, or ends the connection."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    twice = called.outputs() + called.outputs("It is wet.")
    yield from socket.send("response.append", input=twice)

    yield from _is_answered(socket)


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=3, responses=2)
def second_append_is_answered(target: Target, way: Way) -> Scenario:
    """An append that repeats the one before it at once gets an error, or ends the connection."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    for _ in range(2):
        yield from socket.send("response.append", input=called.outputs())

    yield from _is_answered_in_time(socket)


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=3, responses=2)
def other_connection_cannot_append(target: Target, way: Way) -> Scenario:
    """An append reaches the run of its own connection only, which stays suspended."""
    socket = yield from connect(target, way, "first")
    called = yield from socket.call()
    other = yield from connect(target, way, "second")
    yield from other.send("response.append", input=called.outputs())
    yield from _is_answered(other)
    events = yield from socket.append(*called.outputs())

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.APPEND, rule=Rule.APPEND_MISUSE, requests=3, responses=2)
def turn_goes_on_after_misuse(target: Target, way: Way) -> Scenario:
    """After an append that was refused, the whole conversation is answered on a new connection."""
    socket = yield from connect(target, way, "first")
    called = yield from socket.call()
    yield from socket.send("response.append", input=[_STRANGER])
    yield from _is_answered(socket)
    again = yield from connect(target, way, "second")
    events = yield from again.create(input=_whole_conversation(called), tools=[TOOL])

    expect(events[-1]["type"] != "response.failed", "the conversation was not answered")


@checks.over(Way.APPEND, rule=Rule.CREATE_ABANDONS, requests=2)
def whole_conversation_takes_its_place(target: Target, way: Way) -> Scenario:
    """A create that tells the suspended run itself, and its outputs, is answered, as a new one."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.send_create(input=_whole_conversation(called), tools=[TOOL])
    created = (yield from socket.up_to("response.created"))[-1]["response"]
    events = yield from socket.segment()

    expect(created["id"] != called.response_id, "no new response was created")
    expect(events[-1]["response"]["id"] == created["id"], "another response ended in its place")


def _whole_conversation(called: Called) -> list[Event]:
    """Return the input, the calls, and their outputs, as a client sends all of it again."""
    names = ("type", "call_id", "name", "arguments")
    echoes = [{name: call[name] for name in names} for call in called.calls]
    question = {"type": "message", "role": "user", "content": CALLING["input"]}
    return [question, *echoes, *called.outputs()]


def _is_answered_in_time(socket: Socket) -> Steps[None]:
    """Require an error frame or a close, after whatever is still told."""
    came: Any = yield Receive(socket.name)
    while isinstance(came, dict) and came["type"] != "error":
        came = yield Receive(socket.name)
    expect(isinstance(came, dict | Closed), f"it is answered with {came}")
