"""Junk against a server: whatever is sent, the answer is a right error or a right response.

What is sent is drawn from a seed: the same server is asked the same again. It is played in
exchanges of a few frames, each on a connection of its own. Of one that fails, smaller ones are
tried, to tell what it is about it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, TypeAlias

from protocol.codec import encode
from protocol.conformance.actions import Closed, Receive, Scenario, Silence, Steps
from protocol.conformance.captured import read_event_stream, read_response
from protocol.conformance.check import Check, Target, Way
from protocol.conformance.http_steps import ask, post, refusal_of
from protocol.conformance.play import Result, Verdict
from protocol.conformance.rules import NotSupportedError, Rule, expect
from protocol.conformance.shapes import Event
from protocol.conformance.socket_steps import (
    CALLING,
    CLOSING_TYPES,
    Called,
    Socket,
    calls_in,
    connect,
)
from scripts.conformance.junk import MAX_FRAMES, Body, Sent, drawn
from scripts.conformance.right_requests import CALL_ID, FEW_TOKENS, RESPONSE_ID
from scripts.conformance.shrinking import shown, smaller
from scripts.conformance.tokens import Usage, reported

PlayOne: TypeAlias = Callable[[Check], Awaitable[Verdict]]

_SAYS = "Whatever is sent, a right error or a right response comes, and then a create is answered."
_RULES = {Way.HTTP: Rule.REFUSED_BEFORE_STREAM}
_ABNORMAL, _INTERNAL_ERROR = 1006, 1011  # RFC 6455, 7.4.1
_NUM_OTHERS = {Way.HTTP: 1, Way.CHAINED: 1, Way.APPEND: 2 + MAX_FRAMES, Way.INJECT: 2}
"""What an exchange asks for besides: a create that has to work, calls, and what an append lacks."""
_MAX_SHRINKING_SECONDS = 120.0


@dataclass(frozen=True)
class FuzzVerdict(Verdict):
    """The verdict on all exchanges together. Its lines are of one of them."""

    usage: Usage = field(kw_only=True)
    """What all of them used."""


@dataclass(frozen=True)
class Fuzz(Check):
    """A check that is played again and again, each time with other junk."""

    num_frames: int

    def exchange(self, sent: Sent) -> Check:
        """Return the check that sends just this."""
        members = {member.name: getattr(self, member.name) for member in fields(Check)}
        return replace(Check(**members), play=lambda target, way: _exchange(target, way, sent))


def fuzz_checks(num_frames: int) -> tuple[Fuzz, ...]:
    """Return a check for each way, which sends up to ``num_frames`` frames or bodies.

    To find the smallest that fails, it may ask for as much again.
    """
    return tuple(_fuzz_check(way, num_frames) for way in Way) if num_frames else ()


def _fuzz_check(way: Way, num_frames: int) -> Fuzz:
    num_exchanges = -(-num_frames // MAX_FRAMES)
    num_requests = 2 * num_exchanges * (MAX_FRAMES + _NUM_OTHERS[way])
    return Fuzz(
        name=f"{way.value}/junk-is-answered",
        says=_SAYS,
        way=way,
        rule=_RULES.get(way, Rule.SOCKET_SURVIVES),
        num_requests=num_requests,
        num_responses=num_requests,
        is_alone=True,  # if the server does not survive it, that is no fault of the others
        play=_typical_exchange,
        num_frames=num_frames,
    )


def _typical_exchange(target: Target, way: Way) -> Scenario:
    """Send one frame that is right: what is drawn is about as long, and costs as much."""
    create = encode({"type": "response.create", **target.body(**CALLING)})
    sent = Body(create) if way is Way.HTTP else create.decode()
    return _exchange(target, way, [sent])


# --- The search ----------------------------------------------------------------------------------


async def fuzzed(check: Fuzz, target: Target, play_one: PlayOne) -> Verdict:
    """Play exchanges, as many as there may be or up to one that fails; then smaller ones.

    Args:
        check: how much is drawn, and for which way.
        target: of the server.
        play_one: plays one exchange.

    Returns:
        The verdict on the smallest exchange that failed, or that none did.
    """
    search = _Search(check, play_one)
    sent, verdict = await search.first_that_does_not_pass(target)
    told = f"{search.num_frames:,} frames, {search.num_frames / search.seconds:.0f} a second"
    if verdict.result is Result.FAILED:
        sent, verdict = await search.smallest(sent, verdict)
        message = f"{verdict.message}; the smallest that does it: {shown(sent)} (one of {told})"
    else:
        message = verdict.message or told
    return FuzzVerdict(
        check=check,
        result=verdict.result,
        message=message,
        rule=verdict.rule,
        lines=verdict.lines,
        num_requests=search.num_requests,
        usage=search.usage,
    )


class _Search:
    """Counts what is played."""

    def __init__(self, check: Fuzz, play_one: PlayOne) -> None:
        self.num_frames = 0
        self.num_requests = 0
        self.seconds = 1e-9
        self.usage = Usage()
        self._check = check
        self._play_one = play_one

    async def play(self, sent: Sent) -> Verdict:
        """Play an exchange."""
        began_at = time.monotonic()
        verdict = await self._play_one(self._check.exchange(sent))
        self.seconds += time.monotonic() - began_at
        self.num_frames += len(sent)
        self.num_requests += verdict.num_requests
        self.usage += reported(verdict.lines)
        return verdict

    async def first_that_does_not_pass(self, target: Target) -> tuple[Sent, Verdict]:
        """Return the first exchange that does not pass, and its verdict; or the last of all."""
        sent: Sent = ()
        verdict = Verdict(self._check, Result.PASSED)
        exchanges = drawn(target, self._check.way, self._check.num_frames)
        # Hypothesis takes milliseconds for each, in which nobody else could do anything.
        while verdict.result is Result.PASSED and (
            following := await asyncio.to_thread(next, exchanges, None)
        ):
            sent = following
            verdict = await self.play(sent)
        return sent, verdict

    async def smallest(self, sent: Sent, verdict: Verdict) -> tuple[Sent, Verdict]:
        """Return what is left of an exchange that failed when all is left out that need not be.

        It has to fail by the same rule: what is left is to show this fault, and no other.
        """
        until = time.monotonic() + _MAX_SHRINKING_SECONDS
        most = self._check.num_requests - MAX_FRAMES - _NUM_OTHERS[self._check.way]
        num_kept = 0  # of what might be left out, all before this one was tried
        while self.num_requests <= most and time.monotonic() < until:
            less = next(islice(smaller(sent), num_kept, None), None)
            if less is None:
                break
            tried = await self.play(less)
            if tried.result is Result.FAILED and tried.rule is verdict.rule:
                sent, verdict = less, tried
            else:
                num_kept += 1
        return sent, verdict


# --- An exchange ---------------------------------------------------------------------------------


def _exchange(target: Target, way: Way, sent: Sent) -> Scenario:
    """Send junk, each time read the answer, and have a create answered in the end."""
    if way is Way.HTTP:
        for body in sent:
            assert isinstance(body, Body)
            yield from _post(body)
        response = yield from post(target, max_output_tokens=FEW_TOKENS)
        expect(response["status"] != "failed", f"a create fails: {response['error']}")
        return
    talk = _Talk(target, way)
    yield from talk.begin()
    for frame in sent:
        assert not isinstance(frame, Body)
        if talk.is_closed:
            break
        yield from talk.send(frame)
    yield from talk.end()


def _post(body: Body) -> Steps[None]:
    answer = yield from ask("POST", "/responses", body.data, headers=body.headers)
    if answer.status >= 400:
        refused = refusal_of(answer)
        _check_refusal(answer.status, refused.code, str(refused))
        return
    expect(answer.status == 200, f"answered with {answer.status}")
    expect(_may_be_right(body.data) or bool(body.headers), "no JSON object is not refused")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        response = read_event_stream(answer.body)[-1]["response"]
    else:
        response = read_response(answer.body)
    _check_failure(response)


class _Talk:
    """What is said on the connections of one exchange. There is a second if the first is closed."""

    def __init__(self, target: Target, way: Way) -> None:
        self.is_closed = False
        self._target = target
        self._way = way
        self._socket = Socket(target, way, "socket")
        self._waiting: dict[str | None, Called] = {}  # by lane
        self._ids: dict[str, str] = {}  # by what stands for them

    def begin(self) -> Steps[None]:
        """Connect, and where outputs can be brought have a response wait for some."""
        # The query has our own server answer misuse with errors, and means nothing to others.
        query = f"?dialect={self._way.value}"
        self._socket = yield from connect(self._target, self._way, "socket", query)
        if self._way in (Way.APPEND, Way.INJECT):
            is_open = self._way is Way.INJECT
            called = yield from (self._open_call() if is_open else self._socket.call())
            self._waiting[None] = called
            self._ids = {CALL_ID: called.calls[0]["call_id"], RESPONSE_ID: called.response_id}

    def _open_call(self) -> Steps[Called]:
        """Return a response at its call, without the wait for what might follow: it is one call."""
        yield from self._socket.send_create(**CALLING)
        ends = ("response.output_item.done", *CLOSING_TYPES)
        events = yield from self._socket.up_to(*ends)
        while not calls_in(events) and events[-1]["type"] not in CLOSING_TYPES:
            events += yield from self._socket.up_to(*ends)
        expect(bool(calls_in(events)), "a call was required, and there is none")
        return Called(events, calls_in(events), events[0]["response"]["id"])

    def send(self, frame: str | bytes) -> Steps[None]:
        """Send a frame and read all that is said to it."""
        event = _read(frame)
        if isinstance(frame, str):
            for name, known in self._ids.items():
                frame = frame.replace(name, known)
        yield from self._socket.send_raw(frame)
        lane = _lane(event)
        if event.get("type") == "response.append" and lane in self._waiting:
            outputs = self._waiting[lane].outputs()[_brings_output(event) :]
            if outputs:
                yield from self._bring(lane, outputs)
                return
        yield from self._answer(event, frame)

    def _bring(self, lane: str | None, outputs: Sequence[Event]) -> Steps[None]:
        """Bring what an append leaves out: if it was right, nothing is said before to it."""
        name = {} if lane is None else {"stream_id": lane}
        yield from self._socket.send("response.append", input=outputs, **name)
        is_error = yield from self._answer({"type": "response.append"})
        if is_error and not self.is_closed:
            yield from self._answer({"type": "response.append"})

    def _answer(self, event: Event, frame: str | bytes = "{}") -> Steps[bool]:
        """Read up to the end of what is said to ``event``, and tell whether it is an error."""
        told: list[Event] = []
        while True:
            is_patient = not (self._way is Way.INJECT and calls_in(told))
            came: Any = yield Receive(self._socket.name, is_patient)
            if isinstance(came, Closed):
                self._check_close(event, came)
                return True
            if isinstance(came, Silence):
                expect(not is_patient, f"nothing came for {came.seconds:g} s")
                return False  # the response is open
            if _is_abandoned(came):
                continue
            told.append(came)
            kind = came["type"]
            if kind == "error" and len(told) == 1:
                _check_refusal(came["status"], came["error"].get("code"), str(came["error"]))
                yield from self._close_after(event)
                return True
            expect(_may_be_right(frame), f"what is no JSON object is answered with {kind}")
            if kind.endswith((".steer.failed", ".inject.failed")):
                _check_refusal(400, came["error"].get("code"), str(came["error"]))
                return False
            if kind in CLOSING_TYPES:
                self._take_end(came, told)
                return False

    def _close_after(self, event: Event) -> Steps[None]:
        """Take note whether the error of a malformed inject was the last word, as it should be."""
        if event.get("type") == "response.inject":
            came = yield Receive(self._socket.name, is_patient=False)
            self.is_closed = isinstance(came, Closed)

    def _check_close(self, event: Event, closed: Closed) -> None:
        """Check that the server was right to close: at an append it may, if it was no accident."""
        is_unexplained = closed.code == _INTERNAL_ERROR and not closed.reason
        is_accident = closed.code == _ABNORMAL or is_unexplained
        is_right = event.get("type") == "response.append" and not is_accident
        expect(is_right, f"the server closed: {closed.code} {closed.reason}".rstrip())
        self.is_closed = True

    def _take_end(self, end: Event, told: Sequence[Event]) -> None:
        """Take note that a response has come to its end, or waits."""
        response = end.get("response", {})
        _check_failure(response)
        known = self._waiting.pop(end.get("stream_id"), None)
        is_at_its_call = known is not None and known.response_id == response.get("id")
        if self._way is Way.INJECT and is_at_its_call and len(told) == 1:
            raise NotSupportedError("the dialect is ignored: the calls ended the response")
        if end["type"] == "response.done":
            called = Called(told, calls_in(told), response.get("id", ""))
            self._waiting[end.get("stream_id")] = called

    def end(self) -> Steps[None]:
        """Have a create answered."""
        if self.is_closed:
            self.is_closed = False
            self._socket = yield from connect(self._target, self._way, "another")
        yield from self._socket.send_create(max_output_tokens=FEW_TOKENS)
        is_error = yield from self._answer({"type": "response.create"})
        expect(not is_error, "a create is refused")


def _is_abandoned(event: Event) -> bool:
    """Tell whether ``event`` ends a response that waited, as another takes its place."""
    is_end: bool = event["type"] == "response.incomplete"
    return is_end and bool(event["response"]["status"] == "cancelled")


def _check_refusal(status: int, code: str | None, told: str) -> None:
    is_ours = 400 <= status < 500 and code != "server_error"
    expect(is_ours, f"refused as an error of the server: {told}")


def _check_failure(response: Event) -> None:
    error = response.get("error") or {}
    is_ours = error.get("code") != "server_error"
    expect(is_ours, f"the response fails by an error of the server: {error}")


def _read(frame: str | bytes) -> Event:
    """Return the event in ``frame``; without members where there is none."""
    try:
        event = json.loads(frame)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _may_be_right(frame: str | bytes) -> bool:
    """Tell whether a reader that is not strict finds an object in ``frame``."""
    try:
        event: Any = json.loads(frame)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (ValueError, RecursionError):  # numbers too long, levels too many: JSON all the same
        return True
    return isinstance(event, dict)


def _brings_output(event: Event) -> bool:
    """Tell whether ``event`` has an output for the call that the response waits at."""
    items: Any = event.get("input")
    return isinstance(items, list) and any(
        isinstance(item, dict)
        and item.get("call_id") == CALL_ID
        and str(item.get("type")).endswith("_output")
        for item in items
    )


def _lane(event: Event) -> str | None:
    name = event.get("stream_id")
    return name if isinstance(name, str) else None
