"""The inject dialect: one response that stays open at its calls, and is spoken to by its id."""

from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.lane_steps import raise_unless_on_a_lane
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import TERMINAL_TYPES
from protocol.conformance.socket_steps import BOTH, connect, output

checks = Checks()

_CREATED, _FAILED = "response.inject.created", "response.inject.failed"
_STRANGER = output({"type": "function_call", "call_id": "call_none"})


@checks.over(Way.INJECT, rule=Rule.INJECT_RESUMES, requests=2)
def output_resumes_the_response(target: Target, way: Way) -> Scenario:
    """An output that is injected is acknowledged, and the response goes on to its only end."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    events = yield from socket.inject(called.response_id, *called.outputs())

    kinds = [event["type"] for event in events]
    expect(kinds.count(_CREATED) == 1, f"acknowledgements among {kinds}")
    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.INJECT, rule=Rule.INJECT_IS_ATOMIC, requests=3, responses=2)
def output_of_no_call_comes_back(target: Target, way: Way) -> Scenario:
    """Injected items of which one cannot be used come back whole, and none of them counts."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    items = [*called.outputs(), _STRANGER]
    yield from socket.send_inject(called.response_id, *items)
    failed = (yield from socket.up_to(_FAILED))[-1]
    yield from socket.send_inject(called.response_id, *called.outputs())
    answer = (yield from socket.up_to(_CREATED, _FAILED))[-1]

    expect(failed["input"] == items, f"injected were {items}, back came {failed['input']}")
    expect(answer["type"] == _CREATED, f"the outputs were not taken afterwards: {answer}")
    yield from socket.segment()


@checks.over(Way.INJECT, rule=Rule.INJECT_AFTER_END, requests=3, responses=2)
def inject_after_the_end_comes_back(target: Target, way: Way) -> Scenario:
    """What is injected after the end comes back, with `response_already_completed`."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.inject(called.response_id, *called.outputs())
    yield from socket.send_inject(called.response_id, *called.outputs())
    failed = yield from socket.receive()

    expect(failed["type"] == _FAILED, f"it is answered with {failed['type']}")
    code = failed["error"]["code"]
    expect(code == "response_already_completed", f"the code is {code}")
    expect(failed["input"] == called.outputs(), f"back came {failed['input']}")


@checks.over(Way.INJECT, rule=Rule.INJECT_IS_ATOMIC, requests=2, responses=1)
def inject_into_nothing_comes_back(target: Target, way: Way) -> Scenario:
    """What is injected into a response that never was comes back, with `response_not_found`."""
    socket = yield from connect(target, way)
    yield from socket.call()
    yield from socket.send_inject("resp_0123456789abcdef", _STRANGER)
    failed = (yield from socket.up_to(_FAILED))[-1]

    code = failed["error"]["code"]
    expect(code == "response_not_found", f"the code is {code}")
    expect(failed["input"] == [_STRANGER], f"back came {failed['input']}")


@checks.over(Way.INJECT, rule=Rule.INJECT_MALFORMED, requests=2, responses=1)
def malformed_inject_ends_the_connection(target: Target, way: Way) -> Scenario:
    """An inject with a member that it may not have is a 400, and then the server closes."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.send(
        "response.inject", response_id=called.response_id, input=called.outputs(), extra=1
    )
    refused = yield from socket.refused()
    yield from socket.closed()

    refused.expect(status=400)


@checks.over(Way.INJECT, rule=Rule.INJECT_RESUMES, requests=3, responses=2)
def outputs_come_one_by_one(target: Target, way: Way) -> Scenario:
    """The outputs of parallel calls may be injected one by one, the last first."""
    socket = yield from connect(target, way)
    called = yield from socket.call(input=BOTH, parallel_tool_calls=None)
    if len(called.calls) == 1:
        raise NotSupportedError("the model made one call only")
    first, *others = called.outputs()
    yield from socket.send_inject(called.response_id, *others[::-1])
    taken = yield from socket.receive()
    expect(taken["type"] == _CREATED, f"the last outputs are answered with {taken}")
    yield from socket.quiet()
    events = yield from socket.inject(called.response_id, first)

    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.INJECT, rule=Rule.INJECT_IS_ATOMIC, requests=3, responses=2)
def output_is_taken_once(target: Target, way: Way) -> Scenario:
    """Of two equal injects at once the first is taken, and the second comes back whole."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    for _ in range(2):
        yield from socket.send_inject(called.response_id, *called.outputs())
    answers = [(yield from socket.up_to(_CREATED, _FAILED))]
    answers.append((yield from socket.up_to(_CREATED, _FAILED)))
    told = [event for events in answers for event in events]
    if not any(event["type"] in TERMINAL_TYPES for event in told):
        yield from socket.segment()

    kinds = [events[-1]["type"] for events in answers]
    expect(kinds == [_CREATED, _FAILED], f"they are answered with {kinds}")
    back = told[-1]["input"]
    expect(back == called.outputs(), f"injected was {called.outputs()}, back came {back}")


@checks.over(Way.INJECT, rule=Rule.INJECT_IS_LOCAL, requests=3, responses=2)
def other_connection_cannot_inject(target: Target, way: Way) -> Scenario:
    """What another connection injects comes back to it, and the response waits on."""
    socket = yield from connect(target, way, "first")
    called = yield from socket.call()
    other = yield from connect(target, way, "second")
    yield from other.send_inject(called.response_id, *called.outputs())
    failed = yield from other.receive()
    expect(failed["type"] == _FAILED, f"it is answered with {failed['type']}")
    events = yield from socket.inject(called.response_id, *called.outputs())

    code, back = failed["error"]["code"], failed["input"]
    expect(code == "response_not_found", f"the code is {code}")
    expect(back == called.outputs(), f"back came {back}")
    expect(events[-1]["type"] != "response.failed", "the response failed")


@checks.over(Way.INJECT, rule=Rule.SOCKET_SURVIVES, requests=3, responses=2)
def wrong_create_leaves_the_response_open(target: Target, way: Way) -> Scenario:
    """A create that is wrong is refused, unlike an inject, and the open response goes on."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    refused = yield from socket.refuse(input=5)
    events = yield from socket.inject(called.response_id, *called.outputs())

    refused.expect(status=400)
    expect(events[-1]["response"]["id"] == called.response_id, "it goes on under another id")


@checks.over(Way.INJECT, rule=Rule.INJECT_MALFORMED, requests=2, responses=1)
def inject_without_target_ends_the_connection(target: Target, way: Way) -> Scenario:
    """An inject that names no response is a 400, and then the server closes."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    yield from socket.send("response.inject", input=called.outputs())
    refused = yield from socket.refused()
    yield from socket.closed()

    refused.expect(status=400)


@checks.over(Way.INJECT, rule=Rule.ONE_LANE, requests=2)
def inject_stays_on_its_lane(target: Target, way: Way) -> Scenario:
    """An inject names no lane, and is acknowledged on that of its response."""
    socket = yield from connect(target, way)
    called = yield from socket.call(stream_id="one")
    raise_unless_on_a_lane(called.events[0])
    events = yield from socket.inject(called.response_id, *called.outputs())

    lanes = {event.get("stream_id") for event in events}
    expect(lanes == {"one"}, f"the response was created on lane one, and goes on on {lanes}")
