"""Lanes: ordered streams of responses side by side on one connection."""

from protocol.conformance.actions import Scenario, Steps
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.lane_steps import create_on, raise_unless_on_a_lane
from protocol.conformance.refusals import refusal
from protocol.conformance.rules import NonconformityError, Rule, UnusableError, expect
from protocol.conformance.shapes import TERMINAL_TYPES, Event
from protocol.conformance.socket_steps import Socket, connect, output

checks = Checks()

_ENDS = (*TERMINAL_TYPES, "error")
_FEW_TOKENS = 16
_NOBODY = "resp_0123456789abcdef"
_WRONG_NAMES = ("", "a b", "a" * 257, 5, True, ["one"])
_ORPHAN = output({"type": "function_call", "call_id": "call_none"})


@checks.over(Way.CHAINED, rule=Rule.DEFAULT_LANE, requests=1)
def default_lane_has_no_name(target: Target, way: Way) -> Scenario:
    """Events of a create without `stream_id` carry none, not even null."""
    socket = yield from connect(target, way)
    events = yield from socket.create()

    named = [event["type"] for event in events if "stream_id" in event]
    expect(not named, f"events with a stream_id: {named}")


@checks.over(Way.CHAINED, rule=Rule.LANE_NAMES, requests=len(_WRONG_NAMES) + 1, responses=1)
def wrong_names_are_refused(target: Target, way: Way) -> Scenario:
    """A lane of no name, of a space, of 257 letters, or of no string is `invalid_stream_id`."""
    socket = yield from connect(target, way)
    yield from create_on(socket, "one")
    for name in _WRONG_NAMES:
        found = yield from socket.refuse(stream_id=name)
        found.expect(code="invalid_stream_id", param="stream_id")


@checks.over(Way.CHAINED, rule=Rule.LANE_NAMES, requests=1)
def longest_name_is_taken(target: Target, way: Way) -> Scenario:
    """A lane may be called by 256 letters, digits, and `_.-`."""
    socket = yield from connect(target, way)
    name = "Az09_.-" + "z" * 249
    events = yield from create_on(socket, name)

    named = {event["stream_id"] for event in events}
    expect(named == {name}, f"the lane is called {named}")


@checks.over(Way.CHAINED, rule=Rule.LANE_ORDER, requests=2)
def creates_of_one_lane_keep_their_order(target: Target, way: Way) -> Scenario:
    """Of two creates sent at once, the second begins when the first has ended."""
    socket = yield from connect(target, way)
    for _ in range(2):
        yield from socket.send_create()
    first = yield from socket.segment()
    second = yield from socket.segment()

    ids = [{e["response"]["id"] for e in es if "response" in e} for es in (first, second)]
    expect(len(ids[0]) == len(ids[1]) == 1, f"the responses overlap: {ids}")
    expect(ids[0] != ids[1], "two creates got one response")


@checks.over(Way.CHAINED, rule=Rule.ONE_LANE, requests=2)
def lanes_are_told_apart(target: Target, way: Way) -> Scenario:
    """Of two creates on two lanes, each event carries the name of its own."""
    socket = yield from connect(target, way)
    for name in ("one", "two"):
        yield from socket.send_create(stream_id=name)
    raise_unless_on_a_lane((yield from socket.up_to("response.created"))[-1])
    ended: list[str] = []
    while len(ended) < 2:
        event = yield from socket.receive()
        if event["type"] in TERMINAL_TYPES:
            ended.append(event["stream_id"])

    expect(sorted(ended) == ["one", "two"], f"the lanes that ended are {ended}")


@checks.over(Way.CHAINED, rule=Rule.LANES_OVERLAP, requests=2)
def lanes_do_not_wait(target: Target, way: Way) -> Scenario:
    """Of two creates on two lanes, the second begins before the first has ended."""
    socket = yield from connect(target, way)
    for name in ("one", "two"):
        yield from socket.send_create(stream_id=name, input="Count from one to forty.")
    told = yield from _told_of(socket, "one", "two")

    kinds = [event["type"] for event in told]
    expect(kinds.count("response.created") == 2, "a create was not answered with a response")
    ends = [i for i, kind in enumerate(kinds) if kind in TERMINAL_TYPES]
    is_late = "response.created" in kinds[ends[0] :]
    expect(not is_late, "a lane begins only when the other has ended")


@checks.over(Way.CHAINED, rule=Rule.CREATES_QUEUE, requests=17, alone=True)
def seventeenth_create_waits(target: Target, way: Way) -> Scenario:
    """Of 17 creates at once, on as many lanes, none is refused, and each is answered."""
    socket = yield from connect(target, way)
    names = [f"lane-{i}" for i in range(17)]
    for name in names:
        yield from socket.send_create(stream_id=name, max_output_tokens=_FEW_TOKENS)
    try:
        told = yield from _told_of(socket, *names)
    except UnusableError as limited:  # it is of these creates that there are too many
        raise NonconformityError(f"one is refused, and does not wait: {limited}") from None

    refused = [event["error"] for event in told if event["type"] == "error"]
    expect(not refused, f"{len(refused)} are refused: {refused[:1]}")
    failed = [event for event in told if event["type"] == "response.failed"]
    expect(not failed, f"{len(failed)} fail")


@checks.over(Way.CHAINED, rule=Rule.LANE_ERRORS, requests=4, responses=1)
def errors_name_their_lane(target: Target, way: Way) -> Scenario:
    """An error carries the `stream_id` of its create; of the default lane, or a bad name, none."""
    socket = yield from connect(target, way)
    yield from create_on(socket, "one")
    for lane, name in (({"stream_id": "one"}, "one"), ({"stream_id": "a b"}, None), ({}, None)):
        yield from socket.send_create(input=5, **lane)
        error = yield from socket.receive()

        expect(error["type"] == "error", f"expected an error, got {error['type']}")
        expect(error.get("stream_id") == name, f"a create with {lane} is refused with {error}")


@checks.over(Way.CHAINED, rule=Rule.LANES_ARE_INDEPENDENT, requests=3, responses=2)
def failing_fork_evicts_nothing(target: Target, way: Way) -> Scenario:
    """After a fork on another lane that failed, its parent is still there."""
    socket = yield from connect(target, way)
    parent = (yield from create_on(socket, "one"))[-1]["response"]
    asked = {"previous_response_id": parent["id"], "stream_id": "two", "input": [_ORPHAN]}
    yield from socket.refuse(**asked)
    events = yield from socket.follow(parent, "And again.", stream_id="one")

    expect(events[-1]["type"] != "response.failed", "the continuation failed")


@checks.over(Way.CHAINED, rule=Rule.LANES_ARE_INDEPENDENT, requests=3, responses=1)
def failure_leaves_other_lanes_alone(target: Target, way: Way) -> Scenario:
    """While a response is told on one lane, creates fail on others, and it goes on to its end."""
    socket = yield from connect(target, way)
    yield from socket.send_create(stream_id="one")
    raise_unless_on_a_lane((yield from socket.up_to("response.created"))[-1])
    yield from socket.send_create(stream_id="two", input=5)
    yield from socket.send_create(stream_id="three", previous_response_id=_NOBODY)
    told = yield from _told_of(socket, "one", "two", "three")

    ends = [event["type"] for event in told if event.get("stream_id") == "one"][-1:]
    expect(ends != ["response.failed"], "the response failed with those of other lanes")
    num_refused = sum(event["type"] in ("error", "response.failed") for event in told)
    expect(num_refused == 2, f"{num_refused} of the two wrong creates are refused")


@checks.over(Way.CHAINED, rule=Rule.FORKS_ARE_PINNED, requests=4)
def fork_keeps_its_parent(target: Target, way: Way) -> Scenario:
    """A fork in progress ends as one in calm does, although the parent's lane goes on."""
    socket = yield from connect(target, way)
    parent = (yield from create_on(socket, "one"))[-1]["response"]
    forked = {"previous_response_id": parent["id"], "input": "And again."}
    calm = (yield from socket.create(stream_id="calm", **forked))[-1]["response"]
    yield from socket.send_create(stream_id="fork", **forked)
    yield from socket.up_to("response.in_progress")
    yield from socket.send_create(stream_id="one", input="Say goodbye instead.")
    told = yield from _told_of(socket, "fork", "one")

    (end, *_) = [e for e in told if e["type"] in _ENDS and e.get("stream_id") == "fork"]
    is_right = end["type"] not in ("error", "response.failed")
    expect(is_right, f"it failed: {end.get('error') or end['response']['error']}")
    read = [response["usage"]["input_tokens"] for response in (calm, end["response"])]
    expect(read[0] == read[1], f"it has {read[1]} tokens of input, and in calm {read[0]}")


def _told_of(socket: Socket, *names: str) -> Steps[list[Event]]:
    """Return what is told until the response, or the refusal, of each lane has come to its end.

    Raises:
        NotSupportedError: there are no lanes.
    """
    silent, told = set(names), list[Event]()
    while silent:
        event = yield from socket.receive()
        if event["type"] == "error" and event["status"] == 400 and not told:
            refusal(event["status"], event["error"]).raise_unless_it_is_a_fault()
        if event["type"] != "error":
            raise_unless_on_a_lane(event)
        told.append(event)
        if event["type"] in _ENDS:
            silent.discard(event.get("stream_id", ""))
    return told
