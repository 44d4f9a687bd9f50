"""Hard constraints: what the model may not do, however much it would like to.

Also what constrains nothing beyond its own response, and what constrains nothing at all.
"""

from protocol.codec import decode_object, encode
from protocol.conformance.actions import Scenario, Steps
from protocol.conformance.captured import read_event_stream
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, refusal_of
from protocol.conformance.refusals import Refusal, refusal
from protocol.conformance.rules import NonconformityError, NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import BOTH, CALLING, TOOL, Socket, calls_in, connect
from protocol.conformance.steps import streamed

checks = Checks()

_BOTH = (Way.HTTP, Way.CHAINED)
_OTHER_TOOL = TOOL | {"name": "get_time", "description": "Current time in a city"}
_ALLOWED: Event = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": TOOL["name"]}],
}
_COUNTING = "Count from one to three hundred, in words."
_LEAST_LIMIT = 16
"""The least that hosted models allow."""
_TINY_LIMITS = range(1, 6)
_FEW_TOKENS = 16
"""How many at the end of a response may have to be read again, as they are never in a cache."""
_LONG = "Speak of cats and of nothing else. " * 40
"""Longer than a short answer, a short question and the default instructions of any template."""


@checks.over(*_BOTH, rule=Rule.TOOL_CHOICE, requests=1)
def none_makes_no_call(target: Target, way: Way) -> Scenario:
    """With `tool_choice: none` no tool is called."""
    events = yield from streamed(target, way, **(CALLING | {"tool_choice": "none"}))

    expect(not calls_in(events), "a tool was called")


@checks.over(*_BOTH, rule=Rule.TOOL_CHOICE, requests=1)
def named_tool_is_called(target: Target, way: Way) -> Scenario:
    """With a function named, that one is called, with arguments that are JSON of its schema."""
    tools = [TOOL | {"name": "get_time"}, TOOL]
    choice = {"type": "function", "name": TOOL["name"]}
    events = yield from streamed(target, way, **(CALLING | {"tools": tools, "tool_choice": choice}))

    calls = calls_in(events)
    names = [call["name"] for call in calls]
    expect(bool(names) and set(names) == {TOOL["name"]}, f"called were {names}")
    for call in calls:
        arguments = decode_object(call["arguments"])
        expect(arguments.get("city") in ("Oslo", "Rome"), f"the arguments are {arguments}")


@checks.over(*_BOTH, rule=Rule.PARALLEL_TOOL_CALLS, requests=1)
def one_call_at_most(target: Target, way: Way) -> Scenario:
    """With `parallel_tool_calls: false` one call is made."""
    events = yield from streamed(target, way, **(CALLING | {"input": BOTH}))

    num_calls = len(calls_in(events))
    expect(num_calls == 1, f"{num_calls} calls were made")


# --- The limit -----------------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.OUTPUT_LIMIT, requests=len(_TINY_LIMITS))
def tiny_limits_are_kept(target: Target, way: Way) -> Scenario:
    """At limits of 1 to 5 tokens a response is incomplete, and all that it began is closed."""
    for limit in _TINY_LIMITS:
        response = (yield from _limited(target, way, limit))[-1]["response"]

        expect(response["status"] == "incomplete", f"at {limit} it is {response['status']}")
        num_tokens = response["usage"]["output_tokens"]
        expect(num_tokens <= limit, f"{num_tokens} tokens, and {limit} were allowed")


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=len(_TINY_LIMITS) + 1)
def tiny_responses_are_continued(target: Target, way: Way) -> Scenario:
    """A response that ended at a limit of 1 to 5 tokens can be continued, by the next of them."""
    socket = yield from connect(target, way)
    first, *others = _TINY_LIMITS
    parent = (yield from _limited_on(socket, first))[-1]["response"]
    for limit in (*others, _LEAST_LIMIT):
        events = yield from socket.follow(parent, "Go on.", max_output_tokens=limit)
        _expect_continued(parent, events[-1]["response"])
        parent = events[-1]["response"]


def _limited(target: Target, way: Way, limit: int) -> Steps[list[Event]]:
    """Return the events of a response of so many tokens.

    Raises:
        NonconformityError: it is refused.
        NotSupportedError: it is refused for its limit, which hosted models let be no less than 16.
    """
    if way is Way.HTTP:
        body = target.body(stream=True, input=_COUNTING, max_output_tokens=limit)
        answer = yield from ask("POST", "/responses", encode(body))
        if answer.status == 200:
            return read_event_stream(answer.body, judges_frames=False)
        raise _too_little(refusal_of(answer))
    socket = yield from connect(target, way)
    events = yield from _limited_on(socket, limit)
    yield from socket.close()
    return events


def _limited_on(socket: Socket, limit: int) -> Steps[list[Event]]:
    """Return the events of a response of so many tokens, as ``_limited`` does."""
    yield from socket.send_create(input=_COUNTING, max_output_tokens=limit)
    event = yield from socket.receive()
    if event["type"] == "error":
        raise _too_little(refusal(event["status"], event["error"]))
    return [event, *(yield from socket.segment())]


def _too_little(refused: Refusal) -> NonconformityError | NotSupportedError:
    """Return what it means that a response with a limit is refused."""
    if refused.param == "max_output_tokens":
        return NotSupportedError(str(refused))
    return NonconformityError(f"refused: {refused}")


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def torn_response_is_continued(target: Target, way: Way) -> Scenario:
    """A response that ended at its limit can be continued."""
    socket = yield from connect(target, way)
    events = yield from socket.create(input=_COUNTING, max_output_tokens=_LEAST_LIMIT)
    torn = events[-1]["response"]
    if torn["status"] == "completed":
        raise NotSupportedError("the model has less to say")
    child = (yield from socket.follow(torn, "Go on."))[-1]["response"]

    _expect_continued(torn, child)


def _expect_continued(torn: Event, child: Event) -> None:
    """Require that ``child`` goes on from ``torn``."""
    num_tokens = torn["usage"]["output_tokens"]
    expect(child["status"] != "failed", f"what continues {num_tokens} tokens failed")
    named = child.get("previous_response_id")
    expect(named == torn["id"], f"the parent is {torn['id']}, named is {named}")


# --- The tools that may be called ----------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.TOOL_CHOICE, requests=1)
def only_an_allowed_tool_is_called(target: Target, way: Way) -> Scenario:
    """With `allowed_tools` of mode `required`, one of those is called, and no other."""
    asked = {"tools": [_OTHER_TOOL, TOOL], "tool_choice": _ALLOWED}
    events = yield from streamed(target, way, **(CALLING | asked))

    names = [call["name"] for call in calls_in(events)]
    expect(bool(names) and set(names) == {TOOL["name"]}, f"called were {names}")
    told = {tool["name"] for tool in events[-1]["response"]["tools"]}
    expect(told == {"get_time", TOOL["name"]}, f"the tools of the response are {told}")


@checks.over(*_BOTH, rule=Rule.TOOL_CHOICE, requests=1)
def tool_that_is_not_allowed_is_not_called(target: Target, way: Way) -> Scenario:
    """With `allowed_tools` of mode `auto`, none but those is called, whatever is asked."""
    asked = {"input": "What time is it in Oslo?", "tools": [_OTHER_TOOL, TOOL]}
    choice = _ALLOWED | {"mode": "auto"}
    events = yield from streamed(target, way, **(CALLING | asked | {"tool_choice": choice}))

    names = {call["name"] for call in calls_in(events)}
    expect(names <= {TOOL["name"]}, f"called were {names}")


@checks.over(Way.CHAINED, rule=Rule.CACHED_TOKENS, requests=2)
def allowed_tools_keep_the_cache(target: Target, way: Way) -> Scenario:
    """`allowed_tools` changes what may be called and not what the model reads first."""
    socket = yield from connect(target, way)
    tools = [_OTHER_TOOL, TOOL]
    events = yield from socket.create(tools=tools, tool_choice="none")
    parent = events[-1]["response"]
    choice = _ALLOWED | {"mode": "auto"}
    events = yield from socket.follow(parent, "Thank you.", tools=tools, tool_choice=choice)

    _expect_cached(parent["usage"], events[-1]["response"]["usage"])


def _expect_cached(before: Event, after: Event) -> None:
    """Require that of what was read and written before, nearly all is not prefilled again.

    Raises:
        NotSupportedError: nothing is said to be cached.
    """
    num_cached = after["input_tokens_details"]["cached_tokens"]
    if num_cached == 0:
        raise NotSupportedError("nothing is said to be cached")
    least = before["total_tokens"] - _FEW_TOKENS
    is_right = least <= num_cached <= after["input_tokens"]
    expect(is_right, f"{num_cached} tokens are cached: of {after['input_tokens']}, from {least} on")


# --- What is of one response alone ---------------------------------------------------------------


@checks.over(Way.CHAINED, rule=Rule.INSTRUCTIONS_ARE_OWN, requests=2)
def instructions_are_not_inherited(target: Target, way: Way) -> Scenario:
    """A continuation without `instructions` has none, and does not read those of its parent."""
    socket = yield from connect(target, way)
    asked = {"instructions": _LONG, "max_output_tokens": _LEAST_LIMIT}
    parent = (yield from socket.create(**asked))[-1]["response"]
    child = (yield from socket.follow(parent, "And again."))[-1]["response"]

    expect(parent["instructions"] == _LONG, f"repeated is {parent['instructions']!r}")
    expect(not child["instructions"], f"inherited is {child['instructions']!r}")
    _expect_shorter(parent["usage"], child["usage"])


@checks.over(Way.CHAINED, rule=Rule.TOOLS_ARE_OWN, requests=2)
def tools_are_not_inherited(target: Target, way: Way) -> Scenario:
    """A continuation without `tools` has none, and does not read those of its parent."""
    socket = yield from connect(target, way)
    tool = TOOL | {"description": _LONG}
    asked = {"tools": [tool], "tool_choice": "none", "max_output_tokens": _LEAST_LIMIT}
    parent = (yield from socket.create(**asked))[-1]["response"]
    events = yield from socket.follow(parent, "Is it dry in Rome? Look it up.")

    child = events[-1]["response"]
    expect(child["tools"] == [], f"inherited is {child['tools']}")
    expect(not calls_in(events), "a tool of the parent was called")
    _expect_shorter(parent["usage"], child["usage"])


def _expect_shorter(before: Event, after: Event) -> None:
    """Require that a continuation reads less than its parent, of which most is gone."""
    counts = before["input_tokens"], after["input_tokens"]
    expect(counts[1] < counts[0], f"{counts[0]} tokens were read, and then {counts[1]}")


# --- What constrains nothing ---------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.JUNK_TOLERANCE, requests=1)
def unknown_items_are_accepted(target: Target, way: Way) -> Scenario:
    """An item of a type that is not known does not stop a response."""
    items = [
        {"type": "agent_message", "author": "planner", "content": []},
        {"type": "message", "role": "user", "content": "Say hello."},
    ]
    events = yield from streamed(target, way, input=items)

    expect(events[-1]["type"] != "response.failed", "the response failed")


@checks.over(*_BOTH, rule=Rule.JUNK_TOLERANCE, requests=1)
def ids_of_items_are_free(target: Target, way: Way) -> Scenario:
    """Ids that a client gives to its own items refer to nothing."""
    call = {"name": TOOL["name"], "call_id": "call_1", "arguments": '{"city":"Oslo"}'}
    items = [
        {"type": "message", "id": "msg_1", "role": "user", "content": "Is it dry in Oslo?"},
        {"type": "function_call", "id": "fc_1", "status": "completed"} | call,
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "It is."},
    ]
    events = yield from streamed(target, way, input=items, tools=[TOOL], tool_choice="none")

    expect(events[-1]["type"] != "response.failed", "the response failed")


@checks.over(*_BOTH, rule=Rule.JUNK_TOLERANCE, requests=1)
def reasoning_may_be_asked_for_in_vain(target: Target, way: Way) -> Scenario:
    """`include` may name the sealed reasoning, whether there is any or not."""
    events = yield from streamed(target, way, include=["reasoning.encrypted_content"])

    expect(events[-1]["type"] != "response.failed", "the response failed")


@checks.over(Way.CHAINED, rule=Rule.CACHED_TOKENS, requests=2)
def client_metadata_keeps_the_cache(target: Target, way: Way) -> Scenario:
    """`client_metadata`, which changes in each round, is not among what the model reads."""
    socket = yield from connect(target, way)
    events = yield from socket.create(client_metadata={"turn": "1"})
    parent = events[-1]["response"]
    events = yield from socket.follow(parent, "And again.", client_metadata={"turn": "2"})

    _expect_cached(parent["usage"], events[-1]["response"]["usage"])
