"""What the compliance suite of Open Responses asserts, under the names it has there.

The names are those of its tests, of 2026-04-24 and later; ``response-output-phase-schema`` asks
nothing of a server and is left out. As there, each response has to have the whole resource. What
is different: a limit for each response, and a call that is asked for is required, as not every
model would make it. Checks elsewhere are stricter on several of these points.
"""

from typing import Any

from protocol.codec import encode
from protocol.conformance.actions import Answer, Scenario, Steps
from protocol.conformance.captured import read_event
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, post, post_streamed, refusal_of
from protocol.conformance.rules import (
    NonconformityError,
    NotSupportedError,
    Rule,
    expect,
    require,
)
from protocol.conformance.shapes import OPEN_RESPONSE, Event, Shape, check_item, check_usage
from protocol.conformance.socket_steps import CALLING, Socket, connect
from protocol.conformance.steps import refused

checks = Checks()

_NUMBER = (int, float)
_NEVER_NULL: Shape = {
    "id": str,
    "object": str,
    "created_at": int,
    "status": str,
    "model": str,
    "output": list,
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "top_logprobs": int,
    "temperature": _NUMBER,
    "store": bool,
    "background": bool,
    "service_tier": str,
}
_NESTED = {
    "text": {"format"},
    "reasoning": {"effort", "summary"},
    "usage": {"input_tokens_details", "output_tokens_details"},
}
"""Members of those members that are not null. What is in ``format`` says what it is."""
_DETAILS = {"input_tokens_details": "cached_tokens", "output_tokens_details": "reasoning_tokens"}
_FUNCTION = {"type", "name", "description", "parameters", "strict"}
_ABSENT = (404, 405, 501)

_RED = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEM"
    "LQkAKP8/wc53yE8AAAAASUVORK5CYII="
)
"""Eight by eight red pixels."""


def _message(role: str, content: Any, **members: Any) -> Event:
    return {"type": "message", "role": role, "content": content, **members}


_CONVERSATION = [
    _message("user", "We agreed to meet on Tuesday, and to tell Ann first."),
    _message("assistant", "Understood: Tuesday, and Ann is told first."),
]


# --- The resource --------------------------------------------------------------------------------


def _expect_resource(response: Event) -> None:
    """Require that ``response`` is a whole resource, of 31 members."""
    rule = Rule.OPEN_RESPONSE_MEMBERS
    missing = sorted(OPEN_RESPONSE - set(response))
    require(not missing, rule, f"missing: {', '.join(missing)}")
    for member, kind in _NEVER_NULL.items():
        found = response[member]
        require(isinstance(found, kind), rule, f"`{member}` is {found!r}")
    for member, wanted in _NESTED.items():
        nested = response[member]
        missing = sorted(wanted - set(nested)) if nested is not None else []
        require(not missing, rule, f"`{member}` without {', '.join(missing)}")
    for tool in response["tools"]:
        missing = sorted(_FUNCTION - set(tool)) if tool["type"] == "function" else []
        require(not missing, rule, f"a function in `tools` without {', '.join(missing)}")
    if response["usage"] is not None:
        _expect_details(response["usage"])


def _expect_details(usage: Event) -> None:
    for member, count in _DETAILS.items():
        found = usage[member].get(count)
        is_right = isinstance(found, int)
        require(is_right, Rule.OPEN_RESPONSE_MEMBERS, f"`{member}` with {found!r} as `{count}`")


def _expect_completed(target: Target, response: Event) -> None:
    """Require that ``response`` is whole and came to its end, if it could within its limit."""
    _expect_resource(response)
    is_cut = response["status"] == "incomplete"
    if is_cut and response["usage"]["output_tokens"] >= target.max_output_tokens:
        raise NotSupportedError(f"it takes more than {target.max_output_tokens} output tokens")
    expect(response["status"] == "completed", f"the response is {response['status']}")


def _expect_answer(target: Target, response: Event) -> None:
    _expect_completed(target, response)
    expect(bool(response["output"]), "the response has no output")


def _end_of(events: list[Event]) -> Event:
    """Return the response with which ``events`` end; in all of them it is a whole resource."""
    for event in events:
        if "response" in event:
            _expect_resource(event["response"])
    response: Event = events[-1]["response"]
    return response


# --- Over HTTP -----------------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.ANSWERS, requests=1)
def basic_response(target: Target, _: Way) -> Scenario:
    """A message gets a whole response, that is completed, with output."""
    response = yield from post(target, input=[_message("user", "Say hello in three words.")])

    _expect_answer(target, response)


@checks.over(Way.HTTP, rule=Rule.ANSWERS, requests=1)
def streaming_response(target: Target, _: Way) -> Scenario:
    """A message gets a stream, each event of which is right, that ends in a completed response."""
    events = yield from post_streamed(target, input=[_message("user", "Count from 1 to 5.")])

    _expect_completed(target, _end_of(events))


@checks.over(Way.HTTP, rule=Rule.INPUT_MESSAGES, requests=1)
def system_prompt(target: Target, _: Way) -> Scenario:
    """A message of the system is accepted before that of the user."""
    items = [_message("system", "You are a pirate."), _message("user", "Say hello.")]
    response = yield from post(target, input=items)

    _expect_answer(target, response)


@checks.over(Way.HTTP, rule=Rule.INPUT_MESSAGES, requests=1)
def multi_turn(target: Target, _: Way) -> Scenario:
    """Earlier messages of a user and an assistant are accepted as they were."""
    response = yield from post(target, input=[*_CONVERSATION, _message("user", "When is it?")])

    _expect_answer(target, response)


@checks.over(Way.HTTP, rule=Rule.INPUT_MESSAGES, requests=1)
def assistant_phase(target: Target, _: Way) -> Scenario:
    """Earlier messages of an assistant are accepted with the phase that they are of."""
    items = [
        _message("assistant", "I look it up.", phase="commentary"),
        _message("assistant", "It is four.", phase="final_answer"),
        _message("user", "Say it again."),
    ]
    response = yield from post(target, input=items)

    _expect_answer(target, response)


@checks.over(Way.HTTP, rule=Rule.IMAGES, requests=1)
def image_input(target: Target, _: Way) -> Scenario:
    """An image in a message, as a `data:` URL, is accepted."""
    text = {"type": "input_text", "text": "Which colour is this? Answer in a word."}
    image = {"type": "input_image", "image_url": _RED}
    response = yield from post(target, input=[_message("user", [text, image])])

    _expect_answer(target, response)


@checks.over(Way.HTTP, rule=Rule.TOOL_CHOICE, requests=1)
def tool_calling(target: Target, _: Way) -> Scenario:
    """A function that is given without `strict` is called, and repeated with all its members."""
    response = yield from post(target, **CALLING)
    _expect_resource(response)

    kinds = [item["type"] for item in response["output"]]
    expect("function_call" in kinds, f"the output is {kinds}")


@checks.over(Way.HTTP, rule=Rule.CALL_EVENTS, requests=1)
def tool_calling_streaming(target: Target, _: Way) -> Scenario:
    """A call is told as added, arguments in deltas and when they are done, and done."""
    events = yield from post_streamed(target, **CALLING)
    _end_of(events)

    told = {event["type"] for event in events}
    told |= {f"{e['type']}:{e['item']['type']}" for e in events if "item" in e}
    wanted = {
        "response.output_item.added:function_call",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done:function_call",
    }
    missing = ", ".join(sorted(wanted - told))
    expect(not missing, f"not told: {missing}")


# --- Compaction ----------------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.COMPACTION, requests=1)
def compact_response(target: Target, _: Way) -> Scenario:
    """A conversation is compacted to items, one of them a `compaction`."""
    window = yield from _compacted(target, prompt_cache_key="conformance")

    kinds = [item["type"] for item in window]
    expect("compaction" in kinds, f"the output is {kinds}")


@checks.over(Way.HTTP, rule=Rule.COMPACTION, requests=1, responses=0)
def compact_missing_model(target: Target, _: Way) -> Scenario:
    """A compaction that names no model is a 400, or a 422."""
    answer = yield from _ask_to_compact(input=_CONVERSATION)

    expect(answer.status in (400, 422), f"it is answered with {answer.status}")
    refusal_of(answer)


@checks.over(Way.CHAINED, rule=Rule.COMPACTION, requests=2)
def websocket_compact_new_chain(target: Target, way: Way) -> Scenario:
    """What a conversation is compacted to begins another one over WebSocket."""
    window = yield from _compacted(target)
    socket = yield from connect(target, way)
    asked = {"input": [*window, _message("user", "Go on from here.")], "tools": []}
    response = yield from _turn(socket, **asked)

    _expect_completed(target, response)


def _compacted(target: Target, **members: Any) -> Steps[list[Event]]:
    """Return what the conversation is compacted to.

    Raises:
        NotSupportedError: nothing is compacted here.
    """
    model = {} if target.model is None else {"model": target.model}
    answer = yield from _ask_to_compact(**model, input=_CONVERSATION, **members)
    if answer.status != 200:
        refused = refusal_of(answer)
        refused.raise_unless_it_is_a_fault()
        raise NonconformityError(f"refused: {refused}")
    resource = read_event(answer.body)
    kind = resource.get("object")
    expect(kind == "response.compaction", f"the object is {kind!r}")
    for member, kinds in (("id", str), ("created_at", int), ("output", list)):
        found = resource.get(member)
        expect(isinstance(found, kinds), f"`{member}` of a compaction is {found!r}")
    check_usage(resource.get("usage"))
    _expect_details(resource["usage"])
    output: list[Event] = resource["output"]
    for item in output:
        check_item(item)
    expect(bool(output), "a compaction of nothing")
    return output


def _ask_to_compact(**members: Any) -> Steps[Answer]:
    answer = yield from ask("POST", "/responses/compact", encode(members))
    if answer.status in _ABSENT:
        raise NotSupportedError(f"there is no such route: {answer.status}")
    return answer


# --- Over WebSocket ------------------------------------------------------------------------------


@checks.over(Way.CHAINED, rule=Rule.ANSWERS, requests=1)
def websocket_response(target: Target, way: Way) -> Scenario:
    """A create gets events, each of which is right, up to a completed response."""
    socket = yield from connect(target, way)
    response = yield from _turn(socket, input=[_message("user", "Count from 1 to 3.")])

    _expect_completed(target, response)


@checks.over(Way.CHAINED, rule=Rule.ANSWERS, requests=2)
def websocket_sequential_responses(target: Target, way: Way) -> Scenario:
    """A connection takes a second create once the first is completed."""
    socket = yield from connect(target, way)
    for text in ("Say: first.", "Say: second."):
        response = yield from _turn(socket, input=text)
        _expect_completed(target, response)


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def websocket_continuation(target: Target, way: Way) -> Scenario:
    """A create with the id of the one before, which is not stored, is completed.

    ``message-continues-a-response`` also sees that the parent is named.
    """
    socket = yield from connect(target, way)
    parent = yield from _turn(socket, input="The word is cobalt. Say OK.")
    response = yield from _turn(socket, previous_response_id=parent["id"], input="Which word?")

    _expect_completed(target, response)


@checks.over(Way.CHAINED, rule=Rule.STORE_FALSE_IS_LOCAL, requests=3, responses=2)
def websocket_reconnect_store_false_recovery(target: Target, way: Way) -> Scenario:
    """A new connection does not know what was not stored, and takes a create that begins anew.

    As ``other-connection-knows-no-parent``, once the first connection is closed.
    """
    first = yield from connect(target, way, "first")
    parent = yield from _turn(first, input="The word is copper. Say OK.")
    yield from first.close()
    second = yield from connect(target, way, "second")
    found = yield from second.refuse(previous_response_id=parent["id"])
    response = yield from _turn(second, input=[_message("user", "Say: recovered.")])

    found.expect(code="previous_response_not_found")
    _expect_completed(target, response)


@checks.over(Way.CHAINED, rule=Rule.WARM_UP, requests=2, responses=1)
def websocket_generate_false(target: Target, way: Way) -> Scenario:
    """A warm-up is completed without output, and a create that follows it is completed.

    ``warm-up-is-a-parent-twice`` follows it two times.
    """
    socket = yield from connect(target, way)
    warm = yield from _turn(socket, generate=False)
    expect(warm["status"] == "completed", f"the warm-up is {warm['status']}")
    expect(warm["output"] == [], f"the warm-up has the output {warm['output']}")
    response = yield from _turn(socket, previous_response_id=warm["id"], input="Go on.")

    _expect_completed(target, response)


@checks.over(Way.CHAINED, rule=Rule.PARENT_NOT_FOUND, requests=1, responses=0)
def websocket_previous_response_not_found(target: Target, way: Way) -> Scenario:
    """A parent that never was is `previous_response_not_found`.

    ``unknown-parent-is-not-found`` also looks at the param, and asks over HTTP.
    """
    found = yield from refused(target, way, previous_response_id="resp_missing_0123456789")

    found.expect(code="previous_response_not_found")


@checks.over(Way.CHAINED, rule=Rule.FAILED_CONTINUATION_EVICTS, requests=3, responses=1)
def websocket_failed_continuation_evicts_cache(target: Target, way: Way) -> Scenario:
    """After a continuation that failed, its parent is `previous_response_not_found`.

    The same as ``failed-continuation-evicts-its-parent``.
    """
    socket = yield from connect(target, way)
    parent = yield from _turn(socket, input="The word is ember. Say OK.")
    orphan = {"type": "function_call_output", "call_id": "call_missing", "output": "None."}
    yield from socket.refuse(previous_response_id=parent["id"], input=[orphan])
    found = yield from socket.refuse(previous_response_id=parent["id"])

    found.expect(code="previous_response_not_found")


def _turn(socket: Socket, **members: Any) -> Steps[Event]:
    """Return the response to a create, as its last event tells it."""
    return _end_of((yield from socket.create(**members)))
