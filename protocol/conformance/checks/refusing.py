"""Refusals: what a client is told that asks for what cannot be.

Codes are checked where they are documented. Of a member that is wrong, that is its param alone.
"""

from collections.abc import Mapping
from typing import Any

from protocol.codec import encode
from protocol.conformance.actions import (
    Answer,
    Closed,
    Connect,
    Opened,
    Receive,
    Scenario,
    Silence,
    Steps,
)
from protocol.conformance.captured import read_event, read_response
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, post, post_refused, refusal_of
from protocol.conformance.lane_steps import create_on
from protocol.conformance.refusals import Refusal
from protocol.conformance.rules import NonconformityError, NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import TOOL, Socket, connect, output
from protocol.conformance.steps import refused

checks = Checks()

_BOTH = (Way.HTTP, Way.CHAINED)
_MAX_LANES = 32
_MIB = 1 << 20
_CALL = {"type": "function_call", "call_id": "call_none", "name": "get_weather", "arguments": "{}"}
_QUESTION = {"type": "message", "role": "user", "content": "Is it dry in Oslo?"}
_NO_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,bm8gcGljdHVyZQ=="}
_TOO_DEEP = f'{{"input": {"[" * 100_000}'
_TOO_LONG_TO_READ = ("payload_too_large", "string_above_max_length")


# --- Members -------------------------------------------------------------------------------------

_WRONG_TYPES: Mapping[str, Event] = {
    "model": {"model": 5},
    "input": {"input": 5},
    "instructions": {"instructions": 5},
    "previous_response_id": {"previous_response_id": 5},
    "temperature": {"temperature": "hot"},
    "max_output_tokens": {"max_output_tokens": "many"},
    "tools": {"tools": "all"},
    "parallel_tool_calls": {"parallel_tool_calls": "yes"},
    "metadata": {"metadata": {"number": 5}},
}
"""Members of a create, by the one that is wrong."""

_WRONG_VALUES: Mapping[str, Event] = {
    "input": {"input": [{"role": "judge", "content": "Guilty?"}]},
    "temperature": {"temperature": 2.5},
    "top_p": {"top_p": 1.5},
    "max_output_tokens": {"max_output_tokens": 0},
    "top_logprobs": {"top_logprobs": 21},
    "truncation": {"truncation": "somewhat"},
    "tools": {"tools": [TOOL | {"name": "get weather"}]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_time"}},
    "text": {"text": {"format": {"type": "xml"}}},
    "metadata": {"metadata": {f"key-{i}": "value" for i in range(17)}},
}

_MISSING: Mapping[str, Event] = {
    "input": {"input": [{"role": "user"}]},
    "tools": {"tools": [{"type": "function", "parameters": TOOL["parameters"]}]},
    "text": {"text": {"format": {"type": "json_schema", "name": "answer"}}},
}


@checks.over(*_BOTH, rule=Rule.WRONG_MEMBERS, requests=len(_WRONG_TYPES), responses=0)
def wrong_types_are_named(target: Target, way: Way) -> Scenario:
    """A member of a wrong type is a 400 of that param."""
    yield from _expect_refusals(target, way, _WRONG_TYPES)


@checks.over(*_BOTH, rule=Rule.WRONG_MEMBERS, requests=len(_WRONG_VALUES), responses=0)
def wrong_values_are_named(target: Target, way: Way) -> Scenario:
    """A member out of its range, or a name of nothing, is a 400 of that param."""
    yield from _expect_refusals(target, way, _WRONG_VALUES)


@checks.over(*_BOTH, rule=Rule.WRONG_MEMBERS, requests=len(_MISSING), responses=0)
def missing_members_are_named(target: Target, way: Way) -> Scenario:
    """A message without content, a tool without name, or a format without schema is a 400."""
    yield from _expect_refusals(target, way, _MISSING)


def _expect_refusals(target: Target, way: Way, wrong: Mapping[str, Event]) -> Steps[None]:
    """Require a 400 of each param for its members; tell of all that are not, up to the first that
    is accepted."""
    faults: list[str] = []
    for param, members in wrong.items():
        try:
            found = yield from refused(target, way, **members)
        except NonconformityError as fault:
            if fault.rule is not None:
                raise
            faults.append(f"{members}: {fault.message}")
            break  # a response is being told
        else:
            if found.status != 400 or not _is_within(found.param, param):
                faults.append(f"{members}: expected a 400 of param {param}, got {found}")
    expect(not faults, "; ".join(faults))


def _is_within(path: str | None, param: str) -> bool:
    """Tell whether ``path`` is that of ``param``, or of something in it."""
    return path is not None and path.partition(".")[0].partition("[")[0] == param


@checks.over(*_BOTH, rule=Rule.WRONG_MEMBERS, requests=1, responses=0)
def create_without_input_is_refused(target: Target, way: Way) -> Scenario:
    """A create without input, parent or anything else to answer is a 400."""
    found = yield from refused(target, way, input=None)

    found.expect(status=400)


@checks.over(*_BOTH, rule=Rule.ERROR_TYPE, requests=1, responses=0)
def type_says_whose_mistake_it_is(target: Target, way: Way) -> Scenario:
    """The error of a 400 is of type `invalid_request_error`, by which clients do not try again."""
    error = yield from _error(target, way, input=5)

    kind = error["type"]
    expect(kind in ("invalid_request_error", "invalid_request"), f"the type is {kind!r}")


def _error(target: Target, way: Way, **members: Any) -> Steps[Event]:
    """Return the whole error with which a create is refused."""
    if way is Way.HTTP:
        answer = yield from ask("POST", "/responses", encode(target.body(**members)))
        expect(400 <= answer.status < 500, f"expected a refusal, got {answer.status}")
        told = read_event(answer.body)
    else:
        socket = yield from connect(target, way)
        yield from socket.send_create(**members)
        told = yield from socket.receive()
    error: Event = told["error"]
    return error


# --- What a request names ------------------------------------------------------------------------


@checks.over(*_BOTH, rule=Rule.MODEL_NOT_FOUND, requests=1, responses=0)
def unknown_model_is_not_found(target: Target, way: Way) -> Scenario:
    """A model that never was is `model_not_found`."""
    found = yield from refused(target, way, model="no-such-model-0123456789")

    found.expect(status=(400, 404), code="model_not_found", param="model")


@checks.over(*_BOTH, rule=Rule.CONVERSATIONS, requests=1, responses=0)
def unknown_conversation_is_refused(target: Target, way: Way) -> Scenario:
    """A conversation that never was, or that a server does not keep, is a 400 or 404."""
    found = yield from refused(target, way, conversation="conv_0123456789abcdef")

    found.expect(status=(400, 404))


@checks.over(*_BOTH, rule=Rule.CONVERSATIONS, requests=1, responses=0)
def conversation_excludes_a_parent(target: Target, way: Way) -> Scenario:
    """A create that names a conversation and a parent is a 400."""
    both = {"conversation": "conv_0123456789abcdef", "previous_response_id": "resp_0123456789"}
    found = yield from refused(target, way, **both)

    found.expect(status=400)


@checks.over(*_BOTH, rule=Rule.CALLS_ARE_ANSWERED, requests=1, responses=0)
def orphan_output_is_refused(target: Target, way: Way) -> Scenario:
    """Input with an output to which there is no call is a 400 of `input`."""
    found = yield from refused(target, way, input=[_QUESTION, output(_CALL)], tools=[TOOL])

    _expect_input(found)


@checks.over(*_BOTH, rule=Rule.CALLS_ARE_ANSWERED, requests=1, responses=0)
def call_without_output_is_refused(target: Target, way: Way) -> Scenario:
    """Input with a call to which there is no output is a 400 of `input`."""
    found = yield from refused(target, way, input=[_QUESTION, _CALL], tools=[TOOL])

    _expect_input(found)


def _expect_input(found: Refusal) -> None:
    found.expect(status=400)
    expect(_is_within(found.param, "input"), f"expected the param input, got {found}")


@checks.over(*_BOTH, rule=Rule.CONTEXT_LENGTH, requests=1, responses=0, alone=True)
def longer_input_than_the_context_is_refused(target: Target, way: Way) -> Scenario:
    """Two million words are `context_length_exceeded`, as truncation is disabled."""
    found = yield from refused(target, way, input="a " * 2_000_000, truncation="disabled")
    if found.status == 413 or found.code in _TOO_LONG_TO_READ:
        raise NotSupportedError(f"so long an input is not read: {found}")

    found.expect(status=400, code="context_length_exceeded")


# --- Images --------------------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.IMAGES, requests=2, responses=1)
def broken_image_is_refused(target: Target, _: Way) -> Scenario:
    """An image of bytes that are none is a 400, or its response fails with a code of images."""
    plain = yield from post(target, input=[_looking_at()])
    asked = encode(target.body(input=[_looking_at(_NO_IMAGE)]))
    answer = yield from ask("POST", "/responses", asked)
    if answer.status != 200:
        found = refusal_of(answer)
        if not _is_of_images(found.code):  # some of these codes say that an image is "unsupported"
            found.raise_unless_it_is_a_fault()
        found.expect(status=400)
        return
    response = read_response(answer.body)
    if response["status"] != "failed":
        num_read, least = (found["usage"]["input_tokens"] for found in (response, plain))
        if num_read == least:
            raise NotSupportedError("images are ignored")

    expect(response["status"] == "failed", f"its response is {response['status']}")
    code = response["error"]["code"]
    expect(_is_of_images(code), f"its response fails with the code {code}")


def _looking_at(*images: Event) -> Event:
    text = {"type": "input_text", "text": "Which colour is this? Answer in a word."}
    return {"type": "message", "role": "user", "content": [text, *images]}


def _is_of_images(code: str | None) -> bool:
    """Tell whether ``code`` is one of those for images, as `invalid_image`."""
    return code is not None and "image" in code


# --- Who asks ------------------------------------------------------------------------------------


@checks.over(Way.CHAINED, rule=Rule.API_KEY, requests=0)
@checks.over(Way.HTTP, rule=Rule.API_KEY, requests=1, responses=0)
def wrong_key_lets_nobody_in(target: Target, way: Way) -> Scenario:
    """A key that is wrong is `invalid_api_key`, 401, and no WebSocket is opened with it."""
    answer = yield from _asked_with(target, way, "Bearer sk-no-such-key-0123456789")
    expect(answer.status == 401, f"it is answered with {answer.status}")
    if way is Way.HTTP:
        refusal_of(answer).expect(status=401, code="invalid_api_key")


@checks.over(Way.CHAINED, rule=Rule.API_KEY, requests=0)
@checks.over(Way.HTTP, rule=Rule.API_KEY, requests=1, responses=0)
def no_key_lets_nobody_in(target: Target, way: Way) -> Scenario:
    """A request without a key is a 401, and so is an upgrade."""
    answer = yield from _asked_with(target, way, "")

    expect(answer.status == 401, f"it is answered with {answer.status}")


def _asked_with(target: Target, way: Way, authorization: str) -> Steps[Answer]:
    """Return how a create, or an upgrade, is answered.

    Raises:
        NotSupportedError: no key was given, so the server may need none.
        NonconformityError: the upgrade is granted.
    """
    if not target.has_api_key:
        raise NotSupportedError("no key is given, so there is none that is wrong")
    if way is Way.HTTP:
        headers = {"Authorization": authorization}
        return (yield from ask("POST", "/responses", encode(target.body()), headers=headers))
    came = yield Connect("socket", "", (("Authorization", authorization),))
    if isinstance(came, Opened | Silence):
        raise NonconformityError(f"expected a refusal, got {came}")
    assert isinstance(came, Answer)
    return came


# --- Bodies and frames ---------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.REFUSED_BEFORE_STREAM, requests=4, responses=0)
def bodies_that_are_no_object_are_refused(target: Target, _: Way) -> Scenario:
    """A body that is a list, a string, null, or 100,000 brackets deep is a 400."""
    for body in ("[]", '"response.create"', "null", _TOO_DEEP):
        found = yield from post_refused(target, raw=body.encode())
        found.expect(status=(400, 422))


@checks.over(Way.CHAINED, rule=Rule.SOCKET_SURVIVES, requests=8, responses=0)
def frames_that_are_no_event_are_refused(target: Target, way: Way) -> Scenario:
    """Frames that are empty, no object, without a type, or too deep are refused one by one."""
    socket = yield from connect(target, way)
    no_types = ('{"input": "Hi"}', '{"type": null}', '{"type": 5}')
    for frame in ("", "[]", '"response.create"', "null", _TOO_DEEP, *no_types):
        yield from socket.send_raw(frame)
        found = yield from socket.refused()
        found.expect(status=400)


@checks.over(Way.CHAINED, rule=Rule.BINARY_FRAMES, requests=1, responses=0)
def binary_frame_is_answered(target: Target, way: Way) -> Scenario:
    """A binary frame that is no JSON is a 400, or ends the connection with 1003 or 1007."""
    socket = yield from connect(target, way)
    yield from socket.send_raw(b"\xff\x00\xff")

    yield from _expect_answer(socket, 1003, 1007)


@checks.over(Way.CHAINED, rule=Rule.MESSAGE_SIZE, requests=1, responses=0, alone=True)
def long_message_is_answered(target: Target, way: Way) -> Scenario:
    """A message of 17 MiB, of no known type, is a 400, or ends the connection with 1009."""
    socket = yield from connect(target, way)
    yield from socket.send("response.bogus", padding="x" * (17 * _MIB))

    yield from _expect_answer(socket, 1009)


def _expect_answer(socket: Socket, *codes: int) -> Steps[None]:
    """Require an error with status 400, or that the server closes with one of ``codes``."""
    match (yield Receive(socket.name)):
        case Closed(code, reason):
            expect(code in codes, f"the server closed: {code} {reason}".rstrip())
        case Silence(seconds):
            raise NonconformityError(f"nothing came for {seconds:g} s")
        case event:
            told = f"{event.get('status')} {event.get('error')}"
            is_right = event["type"] == "error" and event["status"] == 400
            expect(is_right, f"expected an error of status 400, got {event['type']} {told}")


@checks.over(Way.CHAINED, rule=Rule.BACKGROUND_OVER_HTTP, requests=1, responses=0)
def background_is_refused(target: Target, way: Way) -> Scenario:
    """A create in the background is a 400 of `background` over WebSocket."""
    found = yield from refused(target, way, background=True, store=True)

    found.expect(status=400, param="background")


@checks.over(Way.CHAINED, rule=Rule.LANE_LIMIT, requests=_MAX_LANES + 1, responses=0, alone=True)
def one_lane_too_many_is_refused(target: Target, way: Way) -> Scenario:
    """The 33rd named lane of a connection is `websocket_stream_limit_reached`."""
    socket = yield from connect(target, way)
    for number in range(_MAX_LANES):
        events = yield from create_on(socket, f"lane-{number}", generate=False, input=[])
        if events[-1]["response"]["output"]:
            raise NotSupportedError("warm-ups are answered, and lanes cost too much without them")
    found = yield from socket.refuse(generate=False, input=[], stream_id="one-too-many")

    found.expect(code="websocket_stream_limit_reached", param="stream_id")
