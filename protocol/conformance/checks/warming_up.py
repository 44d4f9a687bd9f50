"""Warm-ups: creates that prepare what comes next, and say nothing."""

from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.rules import Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import TOOL, connect

checks = Checks()

_NUM_WORDS = 200
_PROMPT: Event = {
    "type": "message",
    "role": "developer",
    "content": "Be kind. " * (_NUM_WORDS // 2),
}


@checks.over(Way.CHAINED, rule=Rule.WARM_UP, requests=2, responses=1)
def warm_up_is_context(target: Target, way: Way) -> Scenario:
    """What a warm-up was told, Codex 0.171 says its prompt there, comes before what follows it."""
    socket = yield from connect(target, way)
    told = {"input": [_PROMPT], "tools": [TOOL]}
    warm = (yield from socket.create(generate=False, **told))[-1]["response"]
    expect(warm["status"] == "completed", f"the warm-up is {warm['status']}")
    expect(warm["output"] == [], f"the warm-up has the output {warm['output']}")
    events = yield from socket.follow(warm, "Say hello.", tools=[TOOL])

    expect(events[-1]["type"] != "response.failed", "the continuation failed")
    num_read = events[-1]["response"]["usage"]["input_tokens"]
    message = f"it has {num_read} tokens of input, and the warm-up was told {_NUM_WORDS} words"
    expect(num_read >= _NUM_WORDS, message)


@checks.over(Way.CHAINED, rule=Rule.STORE_FALSE_IS_LOCAL, requests=2, responses=0)
def warm_up_is_local(target: Target, way: Way) -> Scenario:
    """A warm-up is unknown on another connection."""
    first = yield from connect(target, way, "first")
    warm = (yield from first.create(generate=False, tools=[TOOL]))[-1]["response"]
    second = yield from connect(target, way, "second")
    found = yield from second.refuse(previous_response_id=warm["id"])

    found.expect(code="previous_response_not_found", param="previous_response_id")
