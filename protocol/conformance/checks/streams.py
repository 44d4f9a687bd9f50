"""What a stream tells, and in which order.

Most of it the grammar sees in every stream; these checks have each kind of it told.
"""

from operator import itemgetter

from protocol.conformance.actions import Scenario
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import CALLING, TOOL, calls_in, connect
from protocol.conformance.steps import streamed

checks = Checks()

_LEAST_LIMIT = 16  # the least that hosted models allow
_LONG_TOOL: Event = TOOL | {
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "enum": ["to be or not to be, " * 20]}},
        "required": ["text"],
        "additionalProperties": False,
    }
}
"""Its arguments cannot be short."""


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.MESSAGE_EVENTS, requests=1)
def text_is_told_in_order(target: Target, way: Way) -> Scenario:
    """An answer in text is told in the order of the grammar."""
    events = yield from streamed(target, way)

    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    expect(bool(deltas), "no text was told")


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.CALL_EVENTS, requests=1)
def call_is_told_in_order(target: Target, way: Way) -> Scenario:
    """A call is told in the order of the grammar, and completes the response."""
    events = yield from streamed(target, way, **CALLING)

    expect(bool(calls_in(events)), "a call was required, and none was made")
    kind = events[-1]["type"]
    expect(kind == "response.completed", f"a response that stops at a call ended as {kind}")


@checks.over(Way.CHAINED, rule=Rule.ONE_TERMINAL, requests=1)
def nothing_follows_the_end(target: Target, way: Way) -> Scenario:
    """After its terminal event nothing more is said of a response."""
    socket = yield from connect(target, way)
    yield from socket.create()

    yield from socket.quiet()


@checks.over(Way.CHAINED, rule=Rule.SEQUENCE_NUMBERS, requests=2)
def each_response_is_numbered_from_0(target: Target, way: Way) -> Scenario:
    """Numbers begin at 0 in each response, not once on a connection."""
    socket = yield from connect(target, way)
    first = yield from socket.create()
    second = yield from socket.create()

    numbers = [events[0]["sequence_number"] for events in (first, second)]
    expect(numbers == [0, 0], f"two responses begin with the numbers {numbers}")


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.TERMINAL_OUTPUT, requests=1)
def end_repeats_the_items(target: Target, way: Way) -> Scenario:
    """The terminal output is deep-equal to the items as they were done."""
    events = yield from streamed(target, way, **CALLING)

    told = [event for event in events if event["type"] == "response.output_item.done"]
    done = [event["item"] for event in sorted(told, key=itemgetter("output_index"))]
    output = events[-1]["response"]["output"]
    expect(output == done, f"the output is {output}, done were {done}")


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.OUTPUT_LIMIT, requests=1)
def limit_ends_a_call(target: Target, way: Way) -> Scenario:
    """A call that is longer than `max_output_tokens` is torn, and its response incomplete."""
    asked = {"tools": [_LONG_TOOL], "max_output_tokens": _LEAST_LIMIT}
    events = yield from streamed(target, way, **(CALLING | asked))

    _expect_torn(events[-1]["response"])


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.OUTPUT_LIMIT, requests=1)
def limit_ends_a_text(target: Target, way: Way) -> Scenario:
    """A text that is longer than `max_output_tokens` is delivered as far as it was written."""
    story = "Count from one to three hundred, in words."
    events = yield from streamed(target, way, input=story, max_output_tokens=_LEAST_LIMIT)
    response = events[-1]["response"]
    if response["usage"]["output_tokens"] < _LEAST_LIMIT:
        raise NotSupportedError("the model has less to say")

    _expect_torn(response)


def _expect_torn(response: Event) -> None:
    """Require that ``response`` ended at its limit, in the middle of an item."""
    expect(response["status"] == "incomplete", f"the response is {response['status']}")
    reason = response["incomplete_details"]["reason"]
    expect(reason == "max_output_tokens", f"the reason is {reason}")
    statuses = [item.get("status") for item in response["output"]]
    expect(statuses[-1:] == ["incomplete"], f"the items are {statuses}")
    num_tokens = response["usage"]["output_tokens"]
    expect(num_tokens <= _LEAST_LIMIT, f"{num_tokens} tokens, and {_LEAST_LIMIT} were allowed")
