"""One lane of a connection: responses one after the other, in the order asked.

The reader puts what concerns a lane into its inbox; the lane takes one message at a time. So a
response being sampled, the outputs it waits for and the creates behind it never meet but here.
Only steering may come at any moment: it is looked for between two events.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import msgspec

from protocol import errors
from protocol.client_events import (
    CreateParams,
    InjectParams,
    SteerParams,
    input_json,
    parse_steer,
)
from protocol.dialect import Dialect
from protocol.errors import ProtocolError
from protocol.items import CallOutput, InputItem
from protocol.items import Message as MessageItem
from protocol.lane import Lane as LaneTable
from protocol.lane import LaneEvent, LaneState
from protocol.response_stream import ResponseStream
from protocol.server_events import ServerEvent, inject_failed, output_stub, steer_failed
from protocol.validation import JsonObject
from sampler.engine import Resumption
from sampler.snapshot import Snapshot
from sampler.suspension import Suspension
from server.answers import Answers
from server.memory import Memory
from server.past_response import new_id
from server.pre_inference import Prepared, choice_after_calls, refusal_of
from server.reading import model_of_parent, read_append, read_create
from server.responder import Responder
from server.safety import Findings
from server.services import Services
from server.work import Work

_NUM_STREAMS = 4
_MAX_OTHERS = 64  # messages that are no creates, waiting on one lane


@dataclass(frozen=True)
class Create:
    """Asks for a response. It is read when its turn comes: what it means may depend on the response
    before it."""

    frame: JsonObject
    work: Work


@dataclass(frozen=True)
class Append:
    """Adds to the response that waits for outputs, or follows the latest one."""

    frame: JsonObject
    work: Work


@dataclass(frozen=True)
class Inject:
    """Brings outputs for a response by its id."""

    params: InjectParams
    work: Work


@dataclass(frozen=True)
class Steer:
    """Has something to say to a response that is in progress."""

    response_id: str
    frame: JsonObject
    work: Work


Message: TypeAlias = Create | Append | Inject | Steer


@dataclass(frozen=True)
class Steering:
    """What the server has accepted to tell a response."""

    id: str
    params: SteerParams
    work: Work
    """On the message."""
    findings: Findings
    """What was found in it."""


class Peer(Protocol):
    """What a lane needs of its connection."""

    dialect: Dialect
    services: Services
    memory: Memory
    in_flight: asyncio.Semaphore
    """Held by a lane while it samples."""
    steerings: dict[str, list[Steering]]
    """What was accepted and waits for whoever follows a response, by the id of that."""
    untold: list[Work]
    """On the connection as such; the first response that tells of its work tells of this."""

    def next_number(self) -> int:
        """Return the sequence number of an event that belongs to no response."""

    async def send(self, event: ServerEvent, lane: str | None) -> None:
        """Send an event of a lane."""

    async def refuse(self, error: ProtocolError, lane: str | None) -> None:
        """Send an error of a lane."""

    async def refuse_append(self, error: ProtocolError, lane: str | None) -> None:
        """Let the client know that what it appended to is not there, or does not take it."""

    async def lose(self, reason: str) -> None:
        """Let the client know that its suspended response is gone."""

    def warm_up(self, response_id: str, snapshot: Snapshot) -> None:
        """Fill a new cache in the background."""

    def stop_warming_up(self, response_id: str) -> None:
        """Leave a cache as far as it was filled."""


class Lane:
    """Serves what one lane is asked, one thing at a time."""

    def __init__(self, name: str | None, peer: Peer) -> None:
        self.name = name
        self._peer = peer
        self._services = peer.services
        self._memory = peer.memory
        self._table = LaneTable()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._deferred: deque[Message] = deque()  # taken from the inbox before their turn
        self._num_creates = 0
        self._is_waiting = True
        self._responder: Responder | None = None
        self._next: Prepared | None = None  # prepared while a suspended response waited
        self._steerings: list[Steering] = []  # accepted, for the response in progress
        # What comes too late for a response is numbered with what it said.
        self._streams: deque[ResponseStream] = deque(maxlen=_NUM_STREAMS)

    # --- The inbox --------------------------------------------------------------------------------

    def put(self, message: Message) -> None:
        """Hand a message to the lane.

        Raises:
            ProtocolError: too many are waiting.
        """
        if isinstance(message, Create):
            num_waiting, limit = self._num_creates, self._services.settings.max_queued_creates
        else:
            num_waiting = self._inbox.qsize() + len(self._deferred) - self._num_creates
            limit = _MAX_OTHERS
        # Where nothing is in progress, the first is as good as taken.
        if num_waiting >= limit + self._is_waiting:
            raise errors.too_many_queued(limit)
        self._num_creates += isinstance(message, Create)
        message.work.queued()
        self._inbox.put_nowait(message)

    def knows(self, response_id: str) -> bool:
        """Tell whether a response is this lane's: in progress, or one of the latest."""
        return self._stream_of(response_id) is not None

    def _stream_of(self, response_id: str) -> ResponseStream | None:
        streams = (stream for stream in self._streams if stream.response.id == response_id)
        return next(streams, None)

    async def _take(self) -> Message:
        self._is_waiting = True
        message = self._deferred.popleft() if self._deferred else await self._inbox.get()
        self._is_waiting = False
        self._num_creates -= isinstance(message, Create)
        message.work.taken()
        return message

    # --- At rest ----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until cancelled."""
        while True:
            match await self._take():
                case Create() as create:
                    await self._create(create)
                case Append() as append:
                    await self._append_at_rest(append)
                case Inject(params):
                    await self._refuse_inject(params)
                case Steer() as steer:
                    await self._steer(steer)

    async def _create(self, create: Create) -> None:
        try:
            prepared = await self._asked_for(create)
        except ProtocolError as error:
            await self._peer.refuse(error, self.name)
            return
        await self._respond_to(prepared)

    async def _asked_for(self, create: Create) -> Prepared:
        """Return the response that ``create`` asks for.

        Raises:
            ProtocolError: it cannot be; its parent is forgotten.
        """
        frame, memory, work = create.frame, self._memory, create.work
        try:
            parent_model = await model_of_parent(frame, memory, work)
            params = read_create(frame, memory, work, "websocket", parent_model)
        except ProtocolError:
            parent_id = frame.get("previous_response_id")
            self._evict(parent_id if isinstance(parent_id, str) else None)
            raise
        return await self._prepare(params, work)

    async def _append_at_rest(self, append: Append) -> None:
        try:
            prepared = await self._prepare(self._follow_up(append), append.work)
        except ProtocolError as error:
            await self._peer.refuse_append(error, self.name)
            return
        await self._respond_to(prepared)

    def _follow_up(self, append: Append) -> CreateParams:
        """Return the create that an append at rest stands for: the oldest clients append to the
        latest response whatever its end was.

        Raises:
            ProtocolError: there is none, or the append is wrong.
        """
        past = self._memory.latest(self.name)
        if past is None or past.params is None or past.has_failed:
            raise errors.no_suspended_run()
        tools = past.params.tools
        params = read_append(append.frame, tools, append.work)
        return msgspec.structs.replace(
            past.params,
            previous_response_id=past.id,
            input=params.input,
            input_json=params.input_json,
            tool_choice=choice_after_calls(past.params.tool_choice, params.tool_choice),
            generate=True,
        )

    async def _respond_to(self, prepared: Prepared) -> None:
        """Sample a response, and those that it leads to."""
        following: Prepared | None = prepared
        while following:
            following = await self._respond(following)

    async def _prepare(self, params: CreateParams, work: Work) -> Prepared:
        """Prepare a response, with what the client wanted to tell its parent."""
        self._services.draining.check()
        parent_id = params.previous_response_id or ""
        # A warm-up says nothing, so whoever steered would wait for an answer in vain.
        steerings = self._peer.steerings.pop(parent_id, []) if params.generate else []
        try:
            prepared = await self._prepare_with(steerings, params, work)
            if prepared.refusal and self._responder:
                raise prepared.refusal  # for which no suspended response is given up
            return prepared
        except ProtocolError:
            if steerings:
                self._peer.steerings[parent_id] = steerings
            self._evict(parent_id)
            raise

    async def _prepare_with(
        self, steerings: Sequence[Steering], params: CreateParams, work: Work
    ) -> Prepared:
        return await self._services.pre_inference.prepare(
            _with_steerings(params, steerings), self._memory, work
        )

    def _evict(self, parent_id: str | None) -> None:
        """Forget the parent of a failed response, if it is this lane's: a fork has no such power
        (WebSocket events reference, eviction). What is in progress is not to be forgotten."""
        is_in_progress = self._responder is not None and self._responder.id == parent_id
        if parent_id is not None and not is_in_progress:
            self._memory.forget(parent_id, self.name)

    # --- Sampling ---------------------------------------------------------------------------------

    async def _respond(self, prepared: Prepared) -> Prepared | None:
        """Sample one response to its end, and return what comes before anything in the inbox."""
        if prepared.params.previous_response_id is not None:
            self._peer.stop_warming_up(prepared.params.previous_response_id)
        if prepared.is_to_be_sampled and self._peer.untold:
            prepared.work.absorb(self._peer.untold.pop())
        responder = Responder(prepared, self._peer.dialect, self._services, self._memory, self.name)
        suspends = self._peer.dialect is not Dialect.CHAINED
        self._responder = responder
        self._streams.append(responder.stream)
        call_tools = self._wait_for_outputs if suspends else None
        self._table.apply(LaneEvent.CREATE)
        async with aclosing(responder.events(call_tools, self._peer.in_flight)) as events:
            async for event in events:
                await self._peer.send(event, self.name)
                # What is said in between takes the next number.
                if not self._inbox.empty() and responder.stream.is_latest(event):
                    await self._look_for_messages()
        if self._table.state is LaneState.SAMPLING:
            self._table.apply(LaneEvent.FINISH)
        self._responder = None
        following = await self._after(responder)
        self._next, superseding = None, self._next
        return following or superseding

    async def _look_for_messages(self) -> None:
        """Take what need not wait until the response has come to rest."""
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            match message:
                case Steer() as steer:
                    await self._steer(steer)
                case _:
                    self._deferred.append(message)

    async def _after(self, responder: Responder) -> Prepared | None:
        """Do what a response that is over leaves to be done."""
        past = self._memory.find(responder.id)
        if responder.response.status == "failed":
            self._evict(responder.prepared.params.previous_response_id)
            if past and not past.has_failed:
                self._memory.forget(past.id, self.name)
                past = None
        if past and past.is_warm_up and past.snapshot:
            self._peer.warm_up(past.id, past.snapshot)
        if past and responder.unanswered_calls:
            await self._tell_pending(responder)
        return await self._successor(responder) if self._steerings else None

    # --- Suspended --------------------------------------------------------------------------------

    async def _wait_for_outputs(self, suspension: Suspension) -> Resumption | None:
        """Wait until the client has made the calls, gives up the response, or is too slow."""
        assert self._responder is not None, "a suspended response is in progress"
        self._table.apply(LaneEvent.SUSPEND)
        self._peer.in_flight.release()
        try:
            async with asyncio.timeout(self._services.settings.suspend_ttl_seconds) as deadline:
                # Where there are too many, the deadline of the first comes early.
                with self._services.suspended.one_more(
                    self._memory.key_id, partial(_expire, deadline)
                ):
                    resumption = await self._outputs(self._responder, suspension)
        except TimeoutError:
            self._responder.fail(errors.suspension_expired())
            self._memory.forget(self._responder.id, self.name)
            await self._peer.lose("the outputs of the calls did not come in time")
            resumption = None
        # Not where the connection has ended: it ends by taking what there is to acquire.
        await self._peer.in_flight.acquire()
        self._table.apply(LaneEvent.ABANDON if resumption is None else LaneEvent.APPEND)
        return resumption

    async def _outputs(self, responder: Responder, suspension: Suspension) -> Resumption | None:
        """Take messages until the response can go on, or a create takes its place."""
        await self._tell_pending(responder)
        answers = Answers(suspension)
        queued = self._creates_behind() if self._peer.dialect is Dialect.INJECT else []
        try:
            return await self._answered(responder, answers)
        finally:
            self._deferred.extendleft(reversed(queued))

    def _creates_behind(self) -> list[Message]:
        """Take out of the queue what was asked for before the client could know of the suspension.

        An injected response is in flight to its end, so they wait for their turn. In the append
        dialect it is the response that gives way: its last segment was closed.
        """
        creates: list[Message] = [m for m in self._deferred if isinstance(m, Create)]
        self._deferred = deque(m for m in self._deferred if not isinstance(m, Create))
        return creates

    async def _answered(self, responder: Responder, answers: Answers) -> Resumption | None:
        while True:
            message = await self._take()
            match message:
                case Create() as create:
                    if await self._can_supersede(create):
                        return None
                case Steer():
                    await self._steer(message)
                    await self._tell_pending(responder)
                case Append() | Inject():
                    answers, resumption = await self._take_outputs(responder, answers, message)
                    if resumption is not None:
                        return resumption
                    self._table.apply(LaneEvent.HOLD)

    async def _can_supersede(self, create: Create) -> bool:
        """Prepare what is to take the place of the suspended response, if it can be."""
        try:
            self._next = await self._asked_for(create)
        except ProtocolError as error:
            await self._peer.refuse(error, self.name)
            return False
        return True

    async def _take_outputs(
        self, responder: Responder, answers: Answers, message: Append | Inject
    ) -> tuple[Answers, Resumption | None]:
        """Return the answers with what ``message`` adds, and what the response goes on with if it
        now can."""
        match message:
            case Append():
                return await self._take_append(responder, answers, message)
            case Inject():
                return await self._take_inject(responder, answers, message)

    async def _take_append(
        self, responder: Responder, answers: Answers, append: Append
    ) -> tuple[Answers, Resumption | None]:
        try:
            params = read_append(append.frame, responder.prepared.tools, append.work)
            more = answers.plus(
                params.input, params.input_json, responder.call_ids, params.tool_choice
            )
            new = {i: item for i, item in enumerate(params.input) if _is_by_client(item)}
            return more, await self._resumption(responder, more, new, append.work)
        except ProtocolError as error:
            await self._peer.refuse_append(error, self.name)
            return answers, None

    async def _take_inject(
        self, responder: Responder, answers: Answers, inject: Inject
    ) -> tuple[Answers, Resumption | None]:
        params = inject.params
        if params.response_id != responder.id:
            await self._refuse_inject(params)
            return answers, None
        try:
            more = answers.plus(params.outputs, params.raw_input, responder.call_ids)
            new = dict(enumerate(params.outputs))
            resumption = await self._resumption(responder, more, new, inject.work)
        except ProtocolError as error:
            await self._send(responder.stream.inject_failed(error, params.raw_input))
            return answers, None
        await self._send(responder.stream.inject_created())
        return more, resumption

    async def _resumption(
        self, responder: Responder, answers: Answers, new: Mapping[int, InputItem], work: Work
    ) -> Resumption | None:
        """Return what the response goes on with, or None while outputs are awaited.

        Args:
            responder: speaks for the response.
            answers: all that it has been brought.
            new: what the latest message has brought, by its place there.
            work: on that message.

        Raises:
            ProtocolError: it may not be said, does not fit the context, or asks for a choice that
                cannot be kept; nothing was changed.
        """
        pre_inference, prepared = self._services.pre_inference, responder.prepared
        waiting = self._peer.steerings.get(responder.id, [])
        choice = choice_after_calls(prepared.choice, answers.choice)
        if answers.choice is not None:
            await pre_inference.check_choice(
                prepared.params, prepared.tools, choice, responder.prompt
            )
        findings = await pre_inference.classify_input(list(new.values()), work)
        if refusal := refusal_of(findings, "input", list(new)):
            raise refusal
        items = [*answers.supposing_the_rest().items(), *_messages(waiting)]
        prompt = await pre_inference.go_on(responder.prompt, items, work)
        responder.note(work, findings)
        if not answers.is_complete:
            return None
        self._peer.steerings.pop(responder.id, None)
        constraint = pre_inference.constraint(prepared.params, prepared.tools, choice, prompt)
        for steering in waiting:
            responder.note(steering.work, steering.findings)
        responder.go_on(prompt, [*answers.wire_items, *_wire_items(waiting)])
        return Resumption(prompt, work.received_at, constraint, work.seconds)

    # --- Injecting and steering -------------------------------------------------------------------

    async def _refuse_inject(self, params: InjectParams) -> None:
        """Give outputs back for which there is no response any more."""
        response_id, raw_input = params.response_id, params.raw_input
        if stream := self._stream_of(response_id):
            done = errors.response_already_completed(response_id)
            await self._send(stream.inject_failed(done, raw_input))
        else:
            unknown, number = errors.response_not_found(response_id), self._peer.next_number()
            await self._send(inject_failed(unknown, raw_input, response_id, number))

    async def _steer(self, steer: Steer) -> None:
        """Accept what the client has to say to the response in progress, or give it back."""
        try:
            params = parse_steer(steer.frame)
            responder = self._steerable(params.previous_response_id)
            findings = await self._services.pre_inference.classify_input(
                params.messages, steer.work
            )
            if refusal := refusal_of(findings, "input"):
                raise refusal
        except ProtocolError as error:
            await self._refuse_steer(steer, error)
            return
        steering = Steering(new_id("steer"), params, steer.work, findings)
        self._steerings.append(steering)
        responder.steer()
        await self._send(responder.stream.steer_accepted(steering.id))

    def _steerable(self, response_id: str) -> Responder:
        """Return the response in progress, if it is the one to be steered, and can be.

        Raises:
            ProtocolError: it cannot.
        """
        responder = self._responder
        if responder is None or responder.id != response_id or responder.stream.is_finished:
            raise errors.response_already_completed(response_id)
        limit = self._services.settings.max_pending_steers
        if len(self._steerings) + len(self._peer.steerings.get(response_id, [])) >= limit:
            raise errors.too_many_pending_steers(limit)
        return responder

    async def _refuse_steer(self, steer: Steer, error: ProtocolError) -> None:
        response_id, raw_input = steer.response_id, steer.frame.get("input")
        if stream := self._stream_of(response_id):
            await self._send(stream.steer_failed(error, raw_input))
        else:
            number = self._peer.next_number()
            await self._send(steer_failed(error, raw_input, response_id, number))

    def _take_steerings(self) -> list[Steering]:
        steerings, self._steerings = self._steerings, []
        return steerings

    async def _tell_pending(self, responder: Responder) -> None:
        """Say that the response needs outputs first, and keep what is to follow them."""
        stubs = tuple(map(output_stub, responder.unanswered_calls))
        for steering in self._take_steerings():
            self._peer.steerings.setdefault(responder.id, []).append(steering)
            await self._send(responder.stream.steer_pending(steering.id, stubs))

    async def _successor(self, responder: Responder) -> Prepared | None:
        """Return the response that takes up what was said to one that is over.

        If there can be none, what was said goes back to the client, and its parent can be followed
        nevertheless.
        """
        params = msgspec.structs.replace(
            responder.prepared.params,
            previous_response_id=responder.id,
            input=[],
            input_json=[],
        )
        steerings = self._take_steerings()
        try:
            self._services.draining.check()
            work = self._services.new_work()
            return await self._prepare_with(steerings, params, work)
        except ProtocolError as refusal:
            error = errors.successor_creation_failed(refusal.message)
            for steering in steerings:
                await self._send(
                    responder.stream.steer_failed(error, steering.params.raw_input, steering.id)
                )
            return None

    async def _send(self, event: ServerEvent) -> None:
        await self._peer.send(event, self.name)


def _with_steerings(params: CreateParams, steerings: Sequence[Steering]) -> CreateParams:
    """Return ``params`` with what was steered before their own input."""
    return msgspec.structs.replace(
        params,
        input=[*_messages(steerings), *params.input],
        input_json=[*_wire_items(steerings), *params.input_json],
    )


def _messages(steerings: Iterable[Steering]) -> list[InputItem]:
    return [message for steering in steerings for message in steering.params.messages]


def _wire_items(steerings: Iterable[Steering]) -> list[JsonObject]:
    return [item for steering in steerings for item in input_json(steering.params.raw_input)]


def _is_by_client(item: InputItem) -> bool:
    """Tell whether ``item`` is something new, not what the model said and the client repeats."""
    return isinstance(item, CallOutput) or (
        isinstance(item, MessageItem) and item.role != "assistant"
    )


def _expire(deadline: asyncio.Timeout) -> None:
    if not deadline.expired():
        deadline.reschedule(0)
