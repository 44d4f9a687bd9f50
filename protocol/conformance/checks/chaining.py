"""Continuing over one WebSocket, by ``previous_response_id``."""

from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, post_refused
from protocol.conformance.lane_steps import create_on
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.socket_steps import CALLING, TOOL, connect
from protocol.conformance.steps import refused

checks = Checks()

_UNKNOWN = (404, 405, 501)
"""Not there, or not offered, where nothing is kept."""
_FEW_TOKENS = 16
"""How many at the end of a response may have to be read again, as they are never in a cache."""


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def message_continues_a_response(target: Target, way: Way) -> Scenario:
    """A message continues a response that is not stored."""
    socket = yield from connect(target, way)
    parent = (yield from socket.create())[-1]["response"]
    child = (yield from socket.follow(parent, "And again."))[-1]["response"]

    expect(child["id"] != parent["id"], "both have one id")
    named = child.get("previous_response_id")
    expect(named == parent["id"], f"the parent is {parent['id']}, named is {named}")


@checks.over(Way.CHAINED, rule=Rule.CALLS_ARE_ANSWERED, requests=2)
def output_continues_a_call(target: Target, way: Way) -> Scenario:
    """The output of a call continues the response that made it."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    events = yield from socket.follow(called.response, called.outputs(), tools=[TOOL])

    expect(events[-1]["type"] != "response.failed", "the continuation failed")


@checks.over(Way.CHAINED, rule=Rule.CALLS_ARE_ANSWERED, requests=2, responses=1)
def call_has_to_be_answered(target: Target, way: Way) -> Scenario:
    """A continuation that leaves a call without its output is refused."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    asked = {"previous_response_id": called.response_id, "input": "Never mind."}
    found = yield from socket.refuse(tools=[TOOL], **asked)

    found.expect(status=400)


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.PARENT_NOT_FOUND, requests=1, responses=0)
def unknown_parent_is_not_found(target: Target, way: Way) -> Scenario:
    """A parent that never was is `previous_response_not_found`."""
    found = yield from refused(target, way, previous_response_id="resp_0123456789abcdef")

    found.expect(code="previous_response_not_found", param="previous_response_id")


@checks.over(Way.CHAINED, rule=Rule.STORE_FALSE_IS_LOCAL, requests=3, responses=2)
def other_connection_knows_no_parent(target: Target, way: Way) -> Scenario:
    """What is not stored is unknown on another connection, which stays usable."""
    first = yield from connect(target, way, "first")
    parent = (yield from first.create())[-1]["response"]
    second = yield from connect(target, way, "second")
    found = yield from second.refuse(previous_response_id=parent["id"])
    events = yield from second.create()

    found.expect(code="previous_response_not_found", param="previous_response_id")
    expect(events[-1]["type"] != "response.failed", "the connection is not usable any more")


@checks.over(Way.CHAINED, rule=Rule.STORE_FALSE_IS_LOCAL, requests=3, responses=1)
def http_knows_nothing_of_a_connection(target: Target, way: Way) -> Scenario:
    """What is not stored, and still open to its connection, is unknown over HTTP."""
    socket = yield from connect(target, way)
    parent = (yield from socket.create())[-1]["response"]
    continued = yield from post_refused(target, previous_response_id=parent["id"])
    found = yield from ask("GET", f"/responses/{parent['id']}")

    continued.expect(code="previous_response_not_found", param="previous_response_id")
    is_unknown = found.status in _UNKNOWN
    expect(is_unknown, f"it is not stored, and GET is answered with {found.status}")


@checks.over(Way.CHAINED, rule=Rule.FAILED_CONTINUATION_EVICTS, requests=3, responses=1)
def failed_continuation_evicts_its_parent(target: Target, way: Way) -> Scenario:
    """After a continuation that failed, its parent is not found any more."""
    socket = yield from connect(target, way)
    parent = (yield from socket.create())[-1]["response"]
    orphan = {"type": "function_call_output", "call_id": "call_none", "output": "dry"}
    yield from socket.refuse(previous_response_id=parent["id"], input=[orphan])
    found = yield from socket.refuse(previous_response_id=parent["id"])

    found.expect(code="previous_response_not_found")


@checks.over(Way.CHAINED, rule=Rule.SOCKET_SURVIVES, requests=4, responses=1)
def errors_leave_the_connection_open(target: Target, way: Way) -> Scenario:
    """Frames that are no JSON, of no known type, or wrong, are refused; then a create works."""
    socket = yield from connect(target, way)
    for frame in ('{"type": ', '{"type": "response.bogus"}'):
        yield from socket.send_raw(frame)
        (yield from socket.refused()).expect()
    (yield from socket.refuse(input=5)).expect()
    events = yield from socket.create()

    expect(events[-1]["type"] != "response.failed", "the connection is not usable any more")


@checks.over(Way.CHAINED, rule=Rule.WARM_UP, requests=3, responses=2)
def warm_up_is_a_parent_twice(target: Target, way: Way) -> Scenario:
    """A warm-up is completed without output, and can be continued from more than once."""
    socket = yield from connect(target, way)
    events = yield from socket.create(generate=False, input=[], tools=[TOOL])
    warm = events[-1]["response"]
    expect(warm["status"] == "completed", f"the warm-up is {warm['status']}")
    expect(warm["output"] == [], f"the warm-up has the output {warm['output']}")
    expect(warm.get("usage") is not None, "the warm-up has no usage")
    # On the lane of the warm-up, the first continuation may take its place.
    for lane in ("a", "b"):
        events = yield from create_on(socket, lane, previous_response_id=warm["id"], **CALLING)
        expect(events[-1]["type"] == "response.completed", "a continuation did not complete")


@checks.over(Way.CHAINED, Way.APPEND, rule=Rule.CACHED_TOKENS, requests=2)
def parent_is_not_prefilled_again(target: Target, way: Way) -> Scenario:
    """What continues a response has nearly all of its tokens cached."""
    socket = yield from connect(target, way)
    called = yield from socket.call()
    if way is Way.APPEND:
        events = yield from socket.append(*called.outputs())
    else:
        events = yield from socket.follow(called.response, called.outputs(), tools=[TOOL])
    usage = events[-1]["response"]["usage"]
    num_cached = usage["input_tokens_details"]["cached_tokens"]
    if num_cached == 0:
        raise NotSupportedError("nothing is said to be cached")

    least = called.response["usage"]["total_tokens"] - _FEW_TOKENS
    is_right = least <= num_cached <= usage["input_tokens"]
    expect(is_right, f"{num_cached} tokens are cached: of {usage['input_tokens']}, from {least} on")
