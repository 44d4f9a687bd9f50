"""Steering: what a user says to a response while it is being told."""

from typing import Any

from protocol.conformance.actions import Scenario, Steps
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.lane_steps import raise_unless_on_a_lane
from protocol.conformance.refusals import refusal
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import TERMINAL_TYPES, Event
from protocol.conformance.socket_steps import CALLING, TOOL, Socket, connect, output

checks = Checks()

_NUM_WORDS = 200
_WISH = "Be brief. " * (_NUM_WORDS // 2)
"""So long that the tokens that a response has read tell whether it was among them."""
_NOBODY = "resp_0123456789abcdef"
_LONG = "Count from one to forty."
_ACCEPTED, _PENDING, _FAILED = (
    f"response.steer.{end}" for end in ("accepted", "pending", "failed")
)
_MANY = 33
"""One more than are kept where it was seen; how many is nowhere said."""
_GONE = ("response_already_completed", "response_not_active")


@checks.over(Way.CHAINED, rule=Rule.STEER_IS_TAKEN_UP, requests=2)
def successor_takes_up_a_steer(target: Target, way: Way) -> Scenario:
    """A steered response ends, as steered or as it would, and a successor follows by itself."""
    socket = yield from connect(target, way)
    steered = yield from _steered(socket, _WISH, input=_LONG)
    created = yield from socket.receive()
    kind = created["type"]
    expect(kind == "response.created", f"the steered response is followed by {kind}")
    events = yield from socket.segment()

    parent = created["response"].get("previous_response_id")
    expect(parent == steered["id"], f"the successor continues {parent}")
    reason = (steered.get("incomplete_details") or {}).get("reason")
    is_right = reason in (None, "steered", "max_output_tokens")
    expect(is_right, f"the steered response is incomplete for {reason}")
    _expect_the_wish(steered, events[-1]["response"])


@checks.over(Way.CHAINED, rule=Rule.STEER_IS_PENDING, requests=3)
def steer_waits_for_outputs(target: Target, way: Way) -> Scenario:
    """A steer of a response that calls is pending, and is said with the outputs of the calls."""
    socket = yield from connect(target, way)
    message = {"role": "user", "content": [{"type": "input_text", "text": _WISH}]}
    steered = yield from _steered(socket, [message], **CALLING)
    if (steered.get("incomplete_details") or {}).get("reason") == "steered":
        raise NotSupportedError("the response was steered before it could call")
    pending = yield from socket.receive()
    expect(pending["type"] == _PENDING, f"the response is followed by {pending['type']}")
    reason, stubs = pending["reason"], pending["required_input"]
    yield from socket.quiet()
    outputs = [output(item) for item in steered["output"] if "call_id" in item]
    events = yield from socket.follow(steered, outputs, tools=[TOOL])

    expect(reason == "waiting_for_required_input", f"it waits because {reason}")
    required = [stub["call_id"] for stub in stubs]
    are_right = required == [item["call_id"] for item in outputs]
    expect(are_right, f"the calls are {outputs}, required is {stubs}")
    _expect_the_wish(steered, events[-1]["response"])


@checks.over(Way.CHAINED, rule=Rule.ONE_LANE, requests=3)
def steer_stays_on_its_lane(target: Target, way: Way) -> Scenario:
    """Of two lanes one is steered: that is where the successor is, and the other goes on."""
    socket = yield from connect(target, way)
    yield from socket.send_create(stream_id="one", input=_LONG)
    created = (yield from socket.up_to("response.created"))[-1]
    raise_unless_on_a_lane(created)
    yield from socket.send_create(stream_id="two", input=_LONG)
    yield from _send_steer(socket, created["response"], input="Be brief.")
    told: list[Event] = []
    while sum(event["type"] in TERMINAL_TYPES for event in told) < 3:
        event = yield from _next(socket)
        if event["type"] == _FAILED and event["error"].get("code") in _GONE:
            raise NotSupportedError("the response was over before it could be steered")
        expect(event["type"] != _FAILED, f"the steer comes back: {event.get('error')}")
        told.append(event)

    ends = sorted(str(e.get("stream_id")) for e in told if e["type"] in TERMINAL_TYPES)
    expect(ends == ["one", "one", "two"], f"responses end on the lanes {ends}")


@checks.over(Way.CHAINED, rule=Rule.STEER_COMES_BACK, requests=4, responses=1)
def wrong_steers_come_back(target: Target, way: Way) -> Scenario:
    """With a lane, words of the system, or nothing to say, a steer is `invalid_input`."""
    socket = yield from connect(target, way)
    response = yield from _begun(socket, input=_LONG)
    of_system = {"role": "system", "content": "Be brief."}
    on_lane = {"input": "Be brief.", "stream_id": "one"}
    wrong: list[Event] = [on_lane, {"input": [of_system]}, {"input": []}]
    for members in wrong:
        yield from _send_steer(socket, response, **members)
    answers, end = list[Event](), None
    while end is None or len(answers) < len(wrong):
        event = yield from _next(socket)
        if event["type"] in TERMINAL_TYPES:
            end = event
        elif event["type"] in (_ACCEPTED, _FAILED):
            answers.append(event)
            codes = ("invalid_input",) if end is None else ("invalid_input", *_GONE)
            _expect_failed(event, wrong[len(answers) - 1]["input"], *codes)
    yield from socket.quiet()

    expect(end["type"] != "response.failed", "the response failed with what was said to it")


@checks.over(Way.CHAINED, rule=Rule.STEER_COMES_BACK, requests=_MANY + 1, responses=2)
def one_steer_too_many_comes_back(target: Target, way: Way) -> Scenario:
    """Of 33 steers at once, what is not kept comes back, with `too_many_pending_steers`."""
    socket = yield from connect(target, way)
    response = yield from _begun(socket, input=_LONG)
    said = [f"Leave out {number}." for number in range(1, _MANY + 1)]
    for wish in said:
        yield from _send_steer(socket, response, input=wish)
    answers: list[Event] = []
    while len(answers) < _MANY:
        event = yield from _next(socket)
        if event["type"] in (_ACCEPTED, _FAILED):
            answers.append(event)
    yield from socket.close()
    come_back = [i for i, answer in enumerate(answers) if answer["type"] == _FAILED]
    if not come_back:
        raise NotSupportedError(f"{_MANY} steers are kept")
    first = come_back[0]
    if answers[first]["error"].get("code") in _GONE:
        raise NotSupportedError("the response was over before it could be steered so often")

    _expect_failed(answers[first], said[first], "too_many_pending_steers")


@checks.over(Way.CHAINED, rule=Rule.STEER_COMES_BACK, requests=1, responses=0)
def steer_of_nothing_comes_back(target: Target, way: Way) -> Scenario:
    """A steer of a response that never was comes back, with `response_not_found`."""
    socket = yield from connect(target, way)
    answer = yield from _steer(socket, {"id": _NOBODY}, input="Be brief.")

    _expect_failed(answer, "Be brief.", "response_not_found")


@checks.over(Way.CHAINED, rule=Rule.STEER_COMES_BACK, requests=2, responses=1)
def steer_after_the_end_comes_back(target: Target, way: Way) -> Scenario:
    """A steer of a response that is over comes back, and nothing follows."""
    socket = yield from connect(target, way)
    response = (yield from socket.create())[-1]["response"]
    answer = yield from _steer(socket, response, input="Be brief.")
    yield from socket.quiet()

    _expect_failed(answer, "Be brief.", *_GONE)


@checks.over(Way.CHAINED, rule=Rule.STEER_COMES_BACK, requests=3, responses=2)
def other_connection_cannot_steer(target: Target, way: Way) -> Scenario:
    """A steer of another connection's response comes back, and that response is not steered."""
    socket = yield from connect(target, way, "first")
    response = yield from _begun(socket, input=_LONG)
    other = yield from connect(target, way, "second")
    answer = yield from _steer(other, response, input="Be brief.")
    yield from socket.segment()
    events = yield from socket.follow(response, "And again.")

    _expect_failed(answer, "Be brief.", "response_not_found")
    expect(events[-1]["type"] != "response.failed", "the response of the other cannot go on")


def _begun(socket: Socket, **members: Any) -> Steps[Event]:
    """Ask for a response and return it as it begins."""
    yield from socket.send_create(**members)
    events = yield from socket.up_to("response.created")
    response: Event = events[-1]["response"]
    return response


def _steered(socket: Socket, wish: Any, **members: Any) -> Steps[Event]:
    """Return a response that has been steered at its beginning, as it ends.

    Raises:
        NonconformityError: the steer is not accepted, or nothing ends.
        NotSupportedError: the response is over too soon.
    """
    response = yield from _begun(socket, **members)
    yield from _send_steer(socket, response, input=wish)
    told: list[Event] = []
    while not {_ACCEPTED, _FAILED} & {event["type"] for event in told}:
        told.append((yield from _next(socket)))
    is_over = any(event["type"] in TERMINAL_TYPES for event in told)
    if is_over and told[-1]["type"] == _FAILED:
        raise NotSupportedError("the response was over before it could be steered")
    expect(told[-1]["type"] == _ACCEPTED, f"it is answered with {told[-1].get('error')}")
    while told[-1]["type"] not in TERMINAL_TYPES:
        told.append((yield from _next(socket)))
    ended: Event = told[-1]["response"]
    return ended


def _steer(socket: Socket, response: Event, **members: Any) -> Steps[Event]:
    """Steer ``response``, and return what acknowledges that."""
    yield from _send_steer(socket, response, **members)
    event = yield from _next(socket)
    while event["type"] not in (_ACCEPTED, _FAILED):
        event = yield from _next(socket)
    return event


def _send_steer(socket: Socket, response: Event, **members: Any) -> Steps[None]:
    yield from socket.send("response.steer", previous_response_id=response["id"], **members)


def _next(socket: Socket) -> Steps[Event]:
    """Return the next event.

    Raises:
        NotSupportedError: it says that there is no steering, or none of this model.
    """
    event = yield from socket.receive()
    if event["type"] == "error":
        found = refusal(event["status"], event["error"])
        found.raise_unless_it_is_a_fault()
        expect(False, f"refused: {found}")
    if event["type"] == _FAILED and event["error"].get("code") == "steering_not_supported":
        raise NotSupportedError("steering_not_supported")
    return event


def _expect_the_wish(steered: Event, follower: Event) -> None:
    """Require that ``follower`` has read what the user wished."""
    expect(follower["status"] != "failed", f"what follows fails: {follower['error']}")
    before, after = (response["usage"]["input_tokens"] for response in (steered, follower))
    message = f"it has {after} tokens of input after {before}, and was told {_NUM_WORDS} words"
    expect(after >= before + _NUM_WORDS, message)


def _expect_failed(answer: Event, said: Any, *codes: str) -> None:
    """Require that what was ``said`` comes back, with one of ``codes``."""
    expect(answer["type"] == _FAILED, f"it is answered with {answer['type']}")
    code, back = answer["error"].get("code"), answer["steer"].get("input")
    expect(code in codes, f"expected code {' or '.join(codes)}, got {code}")
    expect(back == said, f"said was {said}, back came {back}")
