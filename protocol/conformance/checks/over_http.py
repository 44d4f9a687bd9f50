"""What is special to HTTP: the path, the bodies, what is stored."""

from protocol.codec import encode
from protocol.conformance.actions import Answer, Scenario, Together
from protocol.conformance.captured import read_event_stream, read_response
from protocol.conformance.check import Checks, Target, Way
from protocol.conformance.http_steps import ask, post, post_refused, post_streamed, refusal_of
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import OPEN_RESPONSE

checks = Checks()


@checks.over(Way.HTTP, rule=Rule.ONE_PATH, requests=2, responses=1)
def one_path_takes_both_methods(target: Target, _: Way) -> Scenario:
    """POST works where a GET without upgrade is refused with 4xx."""
    answer = yield from ask("GET", "/responses")
    yield from post(target)

    expect(400 <= answer.status < 500, f"a plain GET is answered with {answer.status}")


@checks.over(Way.HTTP, rule=Rule.OPEN_RESPONSE_MEMBERS, requests=1)
def response_has_all_members(target: Target, _: Way) -> Scenario:
    """A response has the 31 members of Open Responses."""
    response = yield from post(target)

    missing = sorted(OPEN_RESPONSE - set(response))
    expect(not missing, f"missing: {', '.join(missing)}")


@checks.over(Way.HTTP, rule=Rule.STREAM_IS_THE_RESPONSE, requests=2)
def stream_ends_as_the_response(target: Target, _: Way) -> Scenario:
    """A stream ends with the resource that is returned without one."""
    plain = yield from post(target)
    events = yield from post_streamed(target)

    told = events[-1]["response"]
    differ = sorted(set(plain) ^ set(told))
    expect(not differ, f"only one of them has {', '.join(differ)}")
    expect(plain["object"] == told["object"] == "response", f"the object is {told['object']!r}")


@checks.over(Way.HTTP, rule=Rule.SSE_FRAMES, requests=1)
def events_are_framed(target: Target, _: Way) -> Scenario:
    """Each event is framed with its type, and the last frame is `[DONE]`."""
    answer = yield from ask("POST", "/responses", encode(target.body(stream=True)))
    kind = answer.headers.get("content-type", "")

    expect(answer.status == 200, f"a stream was asked for, and the answer is {answer.status}")
    expect(kind.startswith("text/event-stream"), f"a stream of type {kind!r}")
    read_event_stream(answer.body)


@checks.over(Way.HTTP, rule=Rule.REFUSED_BEFORE_STREAM, requests=1, responses=0)
def wrong_request_gets_no_stream(target: Target, _: Way) -> Scenario:
    """A request that is wrong gets a 400, not a stream with an error in it."""
    refused = yield from post_refused(target, stream=True, input=5)

    refused.expect(status=(400, 422))


@checks.over(Way.HTTP, rule=Rule.ERROR_BODY, requests=1, responses=0)
def body_that_is_no_json_is_refused(target: Target, _: Way) -> Scenario:
    """A body that is no JSON gets a 400 with an error of four members."""
    refused = yield from post_refused(target, raw=b'{"input": ')

    refused.expect(status=(400, 422))


@checks.over(Way.HTTP, rule=Rule.STORED_RESPONSES, requests=4, responses=1)
def stored_response_is_kept_until_deleted(target: Target, _: Way) -> Scenario:
    """A stored response is retrieved as it was, and is gone once it is deleted."""
    response = yield from post(target, store=True)
    if response.get("store") is not True:
        raise NotSupportedError("the response says that it is not stored")
    path = f"/responses/{response['id']}"
    found = yield from ask("GET", path)
    _raise_unless_stored(found)
    deleted = yield from ask("DELETE", path)
    gone = yield from ask("GET", path)

    kept = read_response(found.body)
    expect(kept["output"] == response["output"], f"what is kept has the output {kept['output']}")
    expect(deleted.status in (200, 204), f"its deletion is answered with {deleted.status}")
    expect(gone.status == 404, f"once it is deleted, it is answered with {gone.status}")


def _raise_unless_stored(answer: Answer) -> None:
    if answer.status in (404, 405, 501):
        refused = refusal_of(answer)
        if refused.code is None:
            raise NotSupportedError(f"there is no such route: {refused}")
    expect(answer.status == 200, f"it is answered with {answer.status}")


@checks.over(Way.HTTP, rule=Rule.STORE_FALSE_IS_LOCAL, requests=2, responses=1)
def what_is_not_stored_is_no_parent(target: Target, _: Way) -> Scenario:
    """A response that is not stored cannot be continued over HTTP."""
    response = yield from post(target)
    refused = yield from post_refused(target, previous_response_id=response["id"])

    refused.expect(code="previous_response_not_found", param="previous_response_id")


@checks.over(Way.HTTP, rule=Rule.ONE_RESPONSE_ID, requests=3)
def requests_at_once_are_apart(target: Target, _: Way) -> Scenario:
    """Streams that run at the same time have their own ids, and each ends."""
    streams = yield Together(tuple(post_streamed(target) for _ in range(3)))

    ids = {events[0]["response"]["id"] for events in streams}
    expect(len(ids) == 3, f"three responses have the ids {sorted(ids)}")
