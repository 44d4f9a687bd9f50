"""What is kept of responses, what runs in the background, and clients that go away meanwhile."""

from typing import Any
from urllib.parse import quote

from protocol.codec import encode
from protocol.conformance.actions import Answer, Manner, Scenario, Steps
from protocol.conformance.captured import events_in, read_event, read_response
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, post, post_refused, refusal_of
from protocol.conformance.refusals import Refusal
from protocol.conformance.rules import NonconformityError, NotSupportedError, Rule, expect
from protocol.conformance.shapes import TERMINAL_TYPES, Event
from protocol.conformance.socket_steps import TOOL, connect
from protocol.conformance.stream_grammar import check_stream

checks = Checks()

_NUM_EVENTS = 3
"""How many events a client reads before it goes away."""
_ABSENT = (404, 405, 501)
_UNKNOWN = "resp_0123456789abcdef"
_GOING_ON = ("queued", "in_progress")
_OVER = ("completed", "incomplete", "failed", "cancelled")
_COUNTING = "Count from one to three hundred, in words."


# --- What is stored ------------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def stored_response_is_a_parent(target: Target, _: Way) -> Scenario:
    """A stored response is continued over HTTP by its id."""
    parent = yield from _stored(target)
    child = yield from post(target, input="And again.", previous_response_id=parent["id"])

    named = child.get("previous_response_id")
    expect(named == parent["id"], f"the parent is {parent['id']}, named is {named}")


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def stored_response_is_a_parent_on_sockets(target: Target, way: Way) -> Scenario:
    """A response that was stored over HTTP is continued on a WebSocket."""
    parent = yield from _stored(target)
    socket = yield from connect(target, way)
    child = (yield from socket.follow(parent, "And again."))[-1]["response"]

    named = child.get("previous_response_id")
    expect(named == parent["id"], f"the parent is {parent['id']}, named is {named}")


@checks.over(Way.CHAINED, rule=Rule.CONTINUES_FROM_PARENT, requests=2)
def stored_response_outlives_its_connection(target: Target, way: Way) -> Scenario:
    """A response that is stored is continued on another connection, once its own is closed."""
    first = yield from connect(target, way, "first")
    parent = (yield from first.create(store=True))[-1]["response"]
    _raise_unless_kept(parent)
    yield from first.close()
    second = yield from connect(target, way, "second")
    child = (yield from second.follow(parent, "And again."))[-1]["response"]

    named = child.get("previous_response_id")
    expect(named == parent["id"], f"the parent is {parent['id']}, named is {named}")


@checks.over(Way.HTTP, rule=Rule.STORED_RESPONSES, requests=3, responses=1)
def deleted_response_is_no_parent(target: Target, _: Way) -> Scenario:
    """A response that was deleted cannot be continued."""
    response = yield from _stored(target)
    deleted = yield from ask("DELETE", f"/responses/{response['id']}")
    _raise_unless_offered(deleted)
    found = yield from post_refused(target, previous_response_id=response["id"])

    found.expect(status=(400, 404))


@checks.over(Way.HTTP, rule=Rule.STORED_RESPONSES, requests=4, responses=0)
def unknown_response_is_not_found(target: Target, _: Way) -> Scenario:
    """Of a response that never was there is nothing to get, delete, cancel or list: 404."""
    path = f"/responses/{_UNKNOWN}"
    asked = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
    for method, rest in asked:
        answer = yield from ask(method, path + rest)
        _refused(answer).expect(status=404)


@checks.over(Way.HTTP, rule=Rule.INPUT_ITEMS, requests=3, responses=1)
def input_items_are_listed(target: Target, _: Way) -> Scenario:
    """The input of a stored response is listed, the latest item first unless it is asked for."""
    path = yield from _stored_input(target, "One.", "Two.")
    latest_first = yield from _get(path)
    first_first = yield from _get(f"{path}?order=asc")

    expect(first_first["object"] == "list", f"the object is {first_first['object']!r}")
    _expect_page(first_first, "One.", "Two.", has_more=False)
    _expect_page(latest_first, "Two.", "One.", has_more=False)


@checks.over(Way.HTTP, rule=Rule.INPUT_ITEMS, requests=3, responses=1)
def input_items_come_in_pages(target: Target, _: Way) -> Scenario:
    """A page has `limit` items, says whether there are more, and the next one begins after it."""
    path = yield from _stored_input(target, "One.", "Two.", "Three.")
    first = yield from _get(f"{path}?order=asc&limit=2")
    second = yield from _get(f"{path}?order=asc&limit=2&after={quote(first['last_id'])}")

    _expect_page(first, "One.", "Two.", has_more=True)
    _expect_page(second, "Three.", has_more=False)


def _stored(target: Target, **members: Any) -> Steps[Event]:
    """Return a response that is stored.

    Raises:
        NotSupportedError: the response says that it is not.
    """
    response = yield from post(target, store=True, **members)
    _raise_unless_kept(response)
    return response


def _raise_unless_kept(response: Event) -> None:
    if response.get("store") is not True:
        raise NotSupportedError("the response says that it is not stored")


def _stored_input(target: Target, *texts: str) -> Steps[str]:
    """Have a response to messages stored, and return the path of its input items."""
    items = [{"type": "message", "role": "user", "content": text} for text in texts]
    response = yield from _stored(target, input=items)
    return f"/responses/{response['id']}/input_items"


def _expect_page(page: Event, *texts: str, has_more: bool) -> None:
    items = page["data"]
    found = [_text_of(item) for item in items]
    expect(found == [*texts], f"expected {texts}, listed are {found}")
    ends = page["first_id"], page["last_id"]
    expect(ends == (items[0]["id"], items[-1]["id"]), f"the page is said to be {ends}")
    expect(page["has_more"] is has_more, f"has_more is {page['has_more']} after {found}")


def _text_of(message: Event) -> str:
    """Return what a message says, in whichever of both forms it is told."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# --- In the background ---------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.BACKGROUND, requests=4, responses=1)
def background_response_can_be_cancelled(target: Target, _: Way) -> Scenario:
    """A response in the background is returned before it is over, polled, and cancelled."""
    response = yield from _in_background(target)
    path = f"/responses/{response['id']}"
    polled = yield from _get(path)
    cancelled = yield from _get(f"{path}/cancel", "POST")
    found = yield from _get(path)

    expect(response["background"] is True, f"`background` is {response['background']!r}")
    status = response["status"]
    expect(status in _GOING_ON, f"it is returned as {status}")
    status = polled["status"]
    expect(status in (*_GOING_ON, *_OVER), f"polled, it is {status}")
    # It may have ended before it could be cancelled.
    expect(cancelled["status"] in _OVER, f"once it is cancelled, it is {cancelled['status']}")
    expect(found["status"] == cancelled["status"], f"after that it is {found['status']}")


@checks.over(Way.HTTP, rule=Rule.STREAM_RESUMES, requests=3, responses=1)
def background_stream_is_resumed(target: Target, _: Way) -> Scenario:
    """Who leaves the stream of a response in the background can read on where he left it."""
    asked = {"input": _COUNTING, "background": True, "store": True, "stream": True}
    answer = yield from ask("POST", "/responses", encode(target.body(**asked)), _NUM_EVENTS)
    _raise_unless_answered(answer)
    begun = _events_in(answer.body)[:_NUM_EVENTS]
    if begun[0]["response"].get("background") is not True:
        raise NotSupportedError("`background` is ignored")
    path = f"/responses/{begun[0]['response']['id']}"
    last = begun[-1]["sequence_number"]
    resumed = yield from ask("GET", f"{path}?stream=true&starting_after={last}")
    _raise_unless_answered(resumed)
    kept = yield from _get(path)

    events = begun + _rest(resumed.body, begun)
    output = events[-1]["response"]["output"]
    expect(kept["output"] == output, f"kept is {kept['output']}, told was {output}")


@checks.over(Way.HTTP, rule=Rule.BACKGROUND, requests=2, responses=1)
def others_are_not_cancelled(target: Target, _: Way) -> Scenario:
    """A response that is not in the background cannot be cancelled."""
    response = yield from _stored(target)
    answer = yield from ask("POST", f"/responses/{response['id']}/cancel")

    _refused(answer).expect()


@checks.over(Way.HTTP, rule=Rule.BACKGROUND, requests=1, responses=0)
def background_has_to_be_stored(target: Target, _: Way) -> Scenario:
    """A response in the background that is not to be stored could not be found, and is refused."""
    found = yield from post_refused(target, background=True, store=False)

    found.expect()


def _in_background(target: Target) -> Steps[Event]:
    """Return a response as it is when it begins in the background."""
    asked: Event = {"input": _COUNTING, "background": True, "store": True}
    response = yield from post(target, **asked)
    if response.get("background") is not True and response["status"] in _OVER:
        raise NotSupportedError("`background` is ignored")
    return response


def _events_in(body: bytes) -> list[Event]:
    """Return the events of a stream that is left, or read on."""
    events = events_in(body)
    expect(bool(events), f"no stream, or one without events: {body[:80]!r}")
    return events


def _rest(body: bytes, begun: list[Event]) -> list[Event]:
    """Return the events of a stream that is read on, judged together with those before it."""
    rest = _events_in(body)
    numbers = [event["sequence_number"] for event in rest]
    last = begun[-1]["sequence_number"]
    expect(numbers[0] == last + 1, f"after the number {last} comes {numbers[0]}")
    expect(rest[-1]["type"] in TERMINAL_TYPES, f"the last event is {rest[-1]['type']}")
    check_stream(begun + rest)
    return rest


# --- Clients that go away ------------------------------------------------------------------------


@checks.over(Way.HTTP, Way.CHAINED, rule=Rule.CLIENT_MAY_LEAVE, requests=2)
def client_that_leaves_harms_nobody(target: Target, way: Way) -> Scenario:
    """After a client went away in the middle of a response, the next one is answered."""
    if way is Way.HTTP:
        body = encode(target.body(stream=True, input=_COUNTING))
        yield from ask("POST", "/responses", body, _NUM_EVENTS)
        response = yield from post(target)
    else:
        first = yield from connect(target, way, "first")
        yield from first.send_create(input=_COUNTING)
        yield from first.up_to("response.created")
        yield from first.close(Manner.DROPPED)
        second = yield from connect(target, way, "second")
        response = (yield from second.create())[-1]["response"]

    expect(response["status"] != "failed", "the next response failed")


@checks.over(Way.HTTP, rule=Rule.ONE_TERMINAL, requests=2, responses=1)
def response_that_nobody_reads_ends(target: Target, _: Way) -> Scenario:
    """A stored response whose client went away goes on, or has ended as it should."""
    body = encode(target.body(stream=True, input=_COUNTING, store=True))
    answer = yield from ask("POST", "/responses", body, _NUM_EVENTS)
    _raise_unless_answered(answer)
    response = _events_in(answer.body)[0]["response"]
    _raise_unless_kept(response)
    found = yield from ask("GET", f"/responses/{response['id']}")

    if found.status == 200:
        read_response(found.body)
    else:
        _refused(found).expect(status=404)  # nothing of it was kept


# --- Beside responses ----------------------------------------------------------------------------


@checks.over(Way.HTTP, rule=Rule.INPUT_TOKENS, requests=2, responses=1)
def input_tokens_are_those_of_the_response(target: Target, _: Way) -> Scenario:
    """What is counted for a request is what its response says that it read."""
    asked: Event = {"instructions": "Be brief.", "tools": [TOOL], "tool_choice": "none"}
    counting = target.body(max_output_tokens=None, store=None, **asked)
    answer = yield from ask("POST", "/responses/input_tokens", encode(counting))
    _raise_unless_answered(answer)
    counted = read_event(answer.body)
    usage = (yield from post(target, **asked))["usage"]

    kind = counted["object"]
    expect(kind == "response.input_tokens", f"the object is {kind!r}")
    numbers = counted["input_tokens"], usage["input_tokens"]
    expect(numbers[0] == numbers[1], f"{numbers[0]} tokens are counted, {numbers[1]} were read")


@checks.over(Way.HTTP, rule=Rule.MODELS, requests=2, responses=0)
def models_are_listed(target: Target, _: Way) -> Scenario:
    """The models are listed, that which is asked for among them, and each is found by its id."""
    listed = yield from _get("/models")
    ids = [model["id"] for model in listed["data"]]
    expect(bool(ids), "no model is listed")
    wanted = target.model or ids[0]
    found = yield from _get(f"/models/{quote(wanted, safe='/')}")

    kinds = listed["object"], listed["data"][0]["object"], found["object"]
    expect(kinds == ("list", "model", "model"), f"the objects are {kinds}")
    expect(wanted in ids, f"{wanted!r} is none of {ids}")
    expect(found["id"] == wanted, f"found is {found['id']!r} by {wanted!r}")


# --- Answers -------------------------------------------------------------------------------------


def _get(path: str, method: str = "GET") -> Steps[Event]:
    """Return what is found at ``path``.

    Raises:
        NonconformityError: it is refused.
        NotSupportedError: there is no such route.
    """
    answer = yield from ask(method, path)
    _raise_unless_answered(answer)
    return read_event(answer.body)


def _raise_unless_answered(answer: Answer) -> None:
    if answer.status == 200:
        return
    refused = _refused(answer)
    refused.raise_unless_it_is_a_fault()
    raise NonconformityError(f"refused: {refused}")


def _refused(answer: Answer) -> Refusal:
    """Return why something is refused.

    Raises:
        NonconformityError: it is not, or the body does not say why.
        NotSupportedError: there is no such route.
    """
    expect(answer.status >= 400, f"expected a refusal, got {answer.status}")
    _raise_unless_offered(answer)
    return refusal_of(answer)


def _raise_unless_offered(answer: Answer) -> None:
    """Take a plain 404 of a web framework, without an error of the API, as: no such route."""
    if answer.status in _ABSENT and not isinstance(_error_in(answer), dict):
        raise NotSupportedError(f"there is no such route: {answer.status}")


def _error_in(answer: Answer) -> Any:
    try:
        return read_event(answer.body).get("error")
    except NonconformityError:
        return None
