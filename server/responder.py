"""Speaks for one response: turns what the sampling loop gives into the events of its stream.

A response is a run. Where the dialect lets it go on after tool calls, it has several segments; what
it says at the end of one is the whole difference between the dialects.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Collection, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, nullcontext
from dataclasses import replace
from typing import Any, TypeGuard, assert_never

import msgspec

from protocol import errors
from protocol.codec import encode
from protocol.dialect import Dialect
from protocol.errors import ProtocolError
from protocol.output_items import OutputCall, OutputItem, as_input
from protocol.response import IncompleteReason, ResponseResource, Usage, build_response
from protocol.response_stream import ResponseStream, StreamState
from protocol.sealed import seal
from protocol.server_events import ServerEvent
from protocol.tools import split_name
from protocol.validation import JsonObject
from sampler.engine import EngineError, Resumption, ToolCaller
from sampler.outputs import (
    ArgumentsDelta,
    CallDone,
    CallStarted,
    Output,
    ReasoningDelta,
    ReasoningDone,
    SegmentEnded,
    SegmentStarted,
    TextDelta,
)
from sampler.prompt import Prompt
from sampler.recorded_turn import RecordedTurn, TurnItem, calls_in
from sampler.run import Run, RunEvent, Segment, StopReason
from sampler.snapshot import Snapshot
from sampler.suspension import Suspension
from server.compaction import Compacting
from server.ledger import RunOpened
from server.memory import Memory
from server.past_response import PastResponse, new_id, pack, with_ids
from server.pre_inference import Prepared
from server.response_store import StoredResponse
from server.run_report import RunReport, safety_report, usage_of
from server.safety import ClassificationError, Findings
from server.services import Services
from server.work import Stage, Work

TOKEN_IDS = "suspend:token_ids"
"""The entry of ``include`` that asks for the tokens themselves."""


class Responder:
    """Gives the events of one response, and leaves it to be followed."""

    def __init__(
        self,
        prepared: Prepared,
        dialect: Dialect,
        services: Services,
        memory: Memory,
        slot: Hashable,
    ) -> None:
        """Speak for ``prepared``.

        Args:
            prepared: the response.
            dialect: how it ends a segment.
            services: what samples, accounts and stores it.
            memory: where it is kept at rest.
            slot: in which slot.
        """
        self.prepared = prepared
        self.prompt: Prompt = prepared.prompt
        """The conversation so far, the turns of this response included."""
        self._input_items: list[JsonObject] = list(prepared.wire_items)
        self._wire_items: list[JsonObject] = list(prepared.wire_items)  # the output among them
        self._run = prepared.run
        self._dialect = dialect
        self._services = services
        self._memory = memory
        self._slot = slot
        self._store = services.store if prepared.params.store else None
        self._stored_events: list[bytes] = []
        self._in_progress = ExitStack()
        self._failure: ProtocolError | None = None
        self._account = services.post_inference.open(self._opened(), prepared.work)
        self._run_report = RunReport(
            prepared.work,
            tells_tokens=TOKEN_IDS in prepared.params.include,
            is_simulated=services.engine.is_simulated,
        )
        self._unclassified: list[str] = []  # what the item that is open has said
        self._is_filtered = False
        self._findings = [*prepared.findings.verdicts]
        self._num_recorded = 0  # output items that belong to recorded turns
        self._calls: dict[str, OutputCall] = {}  # those among them, by their call ids
        self._at_rest: PastResponse | None = None  # as it was when it came to rest last
        self._num_input_items = len(self._input_items)  # at that time
        self._num_wire_items = len(self._wire_items)
        self.stream = self._new_stream()

    def _opened(self) -> RunOpened:
        """Return what the books say of the response from the beginning."""
        params = self.prepared.params
        is_chained = self._memory.names_are_local or params.previous_response_id is not None
        return RunOpened(
            run_id=self.prepared.id,
            key=self._memory.key_id,
            model=params.model,
            requested_model=self.prepared.work.requested_model or params.model,
            design=self._dialect.value if is_chained else "stateless",
            created_at=int(time.time()),
            is_simulated=self._services.engine.is_simulated,
        )

    @property
    def _runs(self) -> list[Run]:
        """Those begun: the one that compacts the conversation, if any, and the one that answers."""
        compacting = self.prepared.compacting
        return [run for run in (compacting and compacting.run, self._run) if run]

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.prepared.id

    @property
    def response(self) -> ResponseResource:
        """The response as its latest lifecycle event shows it."""
        return self.stream.response

    @property
    def call_ids(self) -> Collection[str]:
        """The ids of all calls that this response has made."""
        return self._calls.keys()

    @property
    def unanswered_calls(self) -> list[OutputCall]:
        """The calls that the response has stopped for."""
        last = calls_in(self.prompt.conversation.items[-1:])
        return [self._calls[call.call_id] for call in last if call.call_id in self._calls]

    # --- Ending early -----------------------------------------------------------------------------

    def cancel(self) -> None:
        """Have sampling end after the token in flight: the client wants no more."""
        for run in self._runs:
            run.wanted_stop = StopReason.CANCELLED

    def steer(self) -> None:
        """Have sampling end at the next gap between items: the client has something to say."""
        for run in self._runs:
            run.wanted_stop = run.wanted_stop or StopReason.STEERED

    def fail(self, error: ProtocolError) -> None:
        """Have the response end as failed, as soon as the token in flight is sampled, or as soon as
        the tool caller returns."""
        self._failure = error
        self.cancel()

    # --- Events -----------------------------------------------------------------------------------

    async def events(
        self,
        call_tools: ToolCaller | None = None,
        turn: AbstractAsyncContextManager[Any] | None = None,
    ) -> AsyncGenerator[ServerEvent, None]:
        """Sample the response and give its events, the terminal one last.

        Close the generator to cancel the run. In the append dialect a run that its client abandons
        while it is suspended gives no terminal event: its last segment was closed, and what came
        now would be taken for the next response.

        Args:
            call_tools: has the calls made that the response stops for; None ends it there.
            turn: what it waits for before it begins, and holds to its end.
        """
        with self._in_progress:
            self._track()
            try:
                async with (
                    turn or nullcontext(),
                    aclosing(self._unstored_events(call_tools)) as events,
                ):
                    async for event in events:
                        if self._store:
                            self._stored_events.append(encode(event))
                            if self.stream.is_finished and self.stream.is_latest(event):
                                await self._put_at_the_end()
                        yield event
            finally:
                # Nobody was told more, but that the server has stopped what is in the background.
                has_failed = self._failure or self.prepared.params.background
                self._finish("failed" if has_failed else "cancelled")

    def _track(self) -> None:
        """From now on a server that is to end waits for this response."""
        self._in_progress.enter_context(self._services.draining.track(self._drained))

    async def _unstored_events(
        self, call_tools: ToolCaller | None
    ) -> AsyncGenerator[ServerEvent, None]:
        try:
            if self.prepared.params.background:
                for event in self.stream.queue():
                    yield event
            if refusal := self.prepared.refusal:
                for event in [*self._start(), *self._refuse(refusal)]:
                    yield event
                return
            if not self._runs:
                for event in self._warm_up():
                    yield event
                return
            if self.prepared.compacting:
                for event in self._start():
                    yield event
                for event in await self._compact(self.prepared.compacting):
                    yield event
            if self._run is None:
                return  # it has ended already
            caller = call_tools and self._while_suspended(call_tools)
            async with aclosing(self._services.engine.sample(self._run, caller)) as outputs:
                async for output in outputs:
                    if self._services.safety.is_on and await self._is_blocked(self._run, output):
                        break
                    for event in self._speak(self._run, output):
                        yield event
            if self._is_filtered:
                for event in self._end_filtered():
                    yield event
            elif not self.stream.is_finished and self._dialect is Dialect.INJECT:
                for event in self._end_cancelled():
                    yield event
        except (EngineError, ClassificationError) as error:
            self._fall_back()
            code = error.code if isinstance(error, EngineError) else "server_error"
            for event in [*self._start(), *self._fail(code, str(error))]:
                yield event

    async def _is_blocked(self, run: Run, output: Output) -> bool:
        """Tell whether the item that ``output`` closes said what may not be said: the client is to
        see no such item whole, so it is classified first. The model goes on meanwhile.

        Raises:
            ClassificationError: nobody knows.
        """
        match output:
            case TextDelta() | ReasoningDelta() | ArgumentsDelta():
                self._unclassified.append(output.text)
                return False
            case SegmentStarted():
                return False
            case ReasoningDone() | CallStarted() | CallDone() | SegmentEnded():
                pass
            case _:
                assert_never(output)
        text, self._unclassified = "".join(self._unclassified), []
        if not text:
            return False
        with (
            self._account.delaying(run.segments[-1]),
            self.prepared.work.stage(Stage.CLASSIFY_OUTPUT),
        ):
            verdict = await self._services.safety.classify_output(text)
        self._findings.append((len(self._findings), verdict))
        self._is_filtered = verdict.blocks
        return verdict.blocks

    def _while_suspended(self, call_tools: ToolCaller) -> ToolCaller:
        """Return ``call_tools`` for a response that nobody waits for meanwhile."""

        async def call(suspension: Suspension) -> Resumption | None:
            self._in_progress.close()
            resumption = await call_tools(suspension)
            self._track()
            return resumption

        return call

    async def _compact(self, compacting: Compacting) -> list[ServerEvent]:
        """Have the conversation compacted, where that makes it shorter, and open the run that goes
        on from there. The item is told of when it is there: it may come to nothing."""
        compacted = await self._services.compactor.compact(compacting, self.prompt)
        if compacting.is_cancelled:
            return self._end_cancelled()
        try:
            run = self._services.pre_inference.open_run(
                self.prepared,
                compacted.prompt,
                replace(self._memory.sources, snapshots=compacted.snapshots),
            )
        except ProtocolError as error:
            return self._fail(error.code or "server_error", error.message)
        run.wanted_stop = compacting.run.wanted_stop
        self._run, self.prompt = run, compacted.prompt
        if (compaction := compacted.compaction) is None:
            return []
        return self.stream.compaction(seal(compaction.summary), compaction.id)

    def _warm_up(self) -> list[ServerEvent]:
        """Return the events of a response that samples nothing (WebSocket events reference,
        ``generate: false``)."""
        engine, memory = self._services.engine, self._memory
        # It is a connection that fills it, in between its responses; of a request nothing is left.
        snapshot = engine.new_snapshot(self.prompt) if memory.names_are_local else None
        segment = self._segment_to_fill(snapshot)
        if snapshot is not None:
            self._account.end_segment(segment, is_resumed=False)
            self._account.close([], "completed")
        events = [
            *self.stream.start(),
            *self.stream.complete(
                usage_of([segment]), self._run_report.in_advance(), int(time.time())
            ),
        ]
        self._rest(snapshot=snapshot, is_warm_up=True)
        return events

    def _segment_to_fill(self, snapshot: Snapshot | None) -> Segment:
        """Return what there is to be filled of ``snapshot``. What past responses hold of it is had
        from them."""
        held: list[int] = []
        if snapshot is not None:
            others = self._memory.sources.snapshots
            held = [other.num_shared(snapshot.token_ids) for other in others]
        return Segment(
            input_tokens=self.prompt.num_tokens,
            cached_tokens=max(held, default=0),
            requested_at=self.prepared.work.received_at,
            ended_at=time.monotonic(),
        )

    def _speak(self, run: Run, output: Output) -> list[ServerEvent]:
        stream = self.stream
        match output:
            case SegmentStarted():
                # A resumed response has been announced already.
                return self._start()
            case TextDelta(text, logprobs):
                return stream.text_delta(text, logprobs)
            case ReasoningDelta(text):
                return stream.reasoning_delta(text)
            case ReasoningDone():
                return stream.reasoning_done()
            case CallStarted(call_id, name, is_custom):
                namespace, bare_name = split_name(name)
                return stream.call_started(call_id, bare_name, namespace, is_custom=is_custom)
            case ArgumentsDelta(text):
                return stream.arguments_delta(text)
            case CallDone():
                return stream.call_done()
            case SegmentEnded():
                return self._end(run, output)
            case _:
                assert_never(output)

    def _start(self) -> list[ServerEvent]:
        is_new = self.stream.state in (StreamState.NEW, StreamState.QUEUED)
        return self.stream.start() if is_new else []

    def _end(self, run: Run, ended: SegmentEnded) -> list[ServerEvent]:
        with self._account.delaying(ended.segment):
            self._account.end_segment(ended.segment, is_resumed=len(run.segments) > 1)
        events = self._closing_events(ended)
        self._keep(run, ended)
        return events

    def _closing_events(self, ended: SegmentEnded) -> list[ServerEvent]:
        stream = self.stream
        if ended.suspension is not None and self._dialect is Dialect.INJECT:
            return stream.pause()
        if ended.reason is StopReason.CANCELLED:
            return self._end_cancelled()
        if ended.suspension is not None:
            return stream.suspend(self._usage(), self._report())
        events = [] if stream.has_items else stream.empty_message()
        match ended.reason:
            case StopReason.END_OF_TURN | StopReason.TOOL_CALLS:
                return [*events, *self._complete()]
            case StopReason.MAX_OUTPUT_TOKENS | StopReason.CONTEXT_LENGTH:
                # The wire has one word for both limits.
                return [*events, *self._end_incomplete("max_output_tokens")]
            case StopReason.CONTENT_FILTER:
                return [*events, *self._end_incomplete("content_filter")]
            case StopReason.STEERED:
                return [*events, *self._end_incomplete("steered")]
            case _:
                assert_never(ended.reason)

    # The end is in the books before it is told: what is told includes that work.

    def _complete(self) -> list[ServerEvent]:
        self._finish("completed")
        return self.stream.complete(self._usage(), self._report(), int(time.time()))

    def _end_incomplete(self, reason: IncompleteReason) -> list[ServerEvent]:
        self._finish("incomplete")
        return self.stream.incomplete(reason, self._usage(), self._report())

    def _end_cancelled(self) -> list[ServerEvent]:
        if self._failure is not None:
            return self._fail(self._failure.code or "server_error", self._failure.message)
        self._finish("cancelled")
        return self.stream.cancel(self._usage(), self._report())

    def _end_filtered(self) -> list[ServerEvent]:
        """What was written of the item in question stays open to the client, and goes nowhere: who
        follows the response goes on from what was said before its last turn."""
        self._rest(prompt=self.prompt)
        return self._end_incomplete("content_filter")

    def _refuse(self, refusal: ProtocolError) -> list[ServerEvent]:
        return self.stream.fail(
            refusal.code or "server_error",
            refusal.message,
            extension=self._run_report.in_advance(),
        )

    def _fail(self, code: str, message: str) -> list[ServerEvent]:
        self._finish("failed")
        return self.stream.fail(code, message, self._usage(), self._report())

    def _drained(self) -> None:
        self.fail(errors.server_error("the server is shutting down"))

    # --- What is left of it -----------------------------------------------------------------------

    def note(self, work: Work, findings: Findings) -> None:
        """Take note of the work on what a client brought, and of what was found in it."""
        self.prepared.work.absorb(work)
        self._findings += findings.verdicts

    def go_on(self, prompt: Prompt, items: Sequence[JsonObject]) -> None:
        """Take note of what a client appended: ``prompt`` includes it."""
        self.prompt = prompt
        named = with_ids(items)
        self._input_items += named
        self._wire_items += named

    def _keep(self, run: Run, ended: SegmentEnded) -> None:
        """Keep the response as it is at rest: over, or suspended."""
        items = self.stream.output[self._num_recorded :]
        self._num_recorded = len(self.stream.output)
        self._calls |= {call.call_id: call for call in filter(_is_call, items)}
        self._wire_items += [msgspec.to_builtins(item) for item in items]
        said = map(as_input, filter(_is_whole, items))
        self.prompt = self.prompt.after(
            RecordedTurn(
                tuple(item for item in said if isinstance(item, TurnItem)), ended.token_ids
            )
        )
        self._rest(prompt=self.prompt, snapshot=self._services.engine.snapshot(run))

    def _rest(
        self,
        *,
        snapshot: Snapshot | None = None,
        prompt: Prompt | None = None,
        is_warm_up: bool = False,
    ) -> None:
        """Keep the response as it is now, with what others can start from."""
        past = PastResponse(
            self.id,
            self.prompt.conversation.items,
            self._wire_items,
            self.prepared.params,
            prompt,
            snapshot,
            is_warm_up,
        )
        self._at_rest = replace(past, snapshot=None)  # that is the memory's to let go of
        self._num_input_items, self._num_wire_items = len(self._input_items), len(self._wire_items)
        self._memory.keep(self._slot, past)

    def _fall_back(self) -> None:
        """Be what the response was when it came to rest last, if it did: it can be followed from
        there, and what was appended since then can be said again."""
        if (past := self._at_rest) is None or past.prompt is None:
            return
        self.prompt = past.prompt
        del self._input_items[self._num_input_items :]
        del self._wire_items[self._num_wire_items :]
        self._memory.keep(self._slot, replace(past, has_failed=True))

    async def store_as_it_is(self) -> None:
        """Store the response before it begins, so that it can be found."""
        if self._store:
            await self._put()

    async def _put_at_the_end(self) -> None:
        """Store the response, which is over. Only who will have to look for it waits for that."""
        assert self._store is not None
        if self.prepared.params.background:
            await self._put()  # if it fails, nobody would ever see the response
        else:
            await self._store.put_soon(self._stored())

    async def _put(self) -> None:
        assert self._store is not None
        await self._store.put(self._stored())

    def _stored(self) -> StoredResponse:
        with self.prepared.work.stage(Stage.STORE):  # the store times the rest itself
            return StoredResponse(
                id=self.id,
                key=self._memory.key_id,
                model=self._services.engine.name,
                created_at=self.response.created_at,
                response=encode(self.response),
                input_items=list(self._input_items),
                # What may not be said here is nothing to go on from.
                conversation=pack(() if self.prepared.refusal else self.prompt.conversation.items),
                events=self._stored_events,
                item_ids=tuple(item.id for item in self.response.output),
            )

    def _finish(self, status: str) -> None:
        """Account for the response, which is over, unless that was done."""
        if not self._runs:
            return
        if not self._runs[-1].is_finished:
            self._runs[-1].apply(RunEvent.CANCEL)  # its turn never came
        with self._account.delaying(self._runs[-1].segments[-1]):
            self._account.close(self._runs, status)

    def _new_stream(self) -> ResponseStream:
        params = self.prepared.params
        response = build_response(
            params,
            id=self.id,
            created_at=int(time.time()),
            store=self._store is not None,
            extension=self._run_report.in_advance(),
        )
        if params.background:
            response = msgspec.structs.replace(response, status="queued")
        summary = params.reasoning.summary if params.reasoning else None
        return ResponseStream(
            response,
            new_id,
            padding=_padding if params.include_obfuscation else None,
            reasoning_as_summary=summary is not None,
            seals_reasoning="reasoning.encrypted_content" in params.include,
        )

    def _usage(self) -> Usage:
        """Return the usage to tell now: clients of the append dialect add up the segments, of which
        the first includes what compacting took; where a response has but one closing event, it is
        the sum."""
        segments = self._runs[-1].segments
        if self._dialect is not Dialect.INJECT and len(segments) > 1:
            return usage_of(segments[-1:])
        return usage_of([segment for run in self._runs for segment in run.segments])

    def _report(self) -> JsonObject:
        """Return the report to tell now. Where a response has but one closing event, that one
        tells of all its segments; otherwise each of those that it ends."""
        report = self._run_report.told_of(self._runs)
        if self._services.safety.is_on:
            report["safety"] = safety_report(self._services.safety.name, self._findings)
        return report


def _is_call(item: OutputItem) -> TypeGuard[OutputCall]:
    return isinstance(item, OutputCall)


def _is_whole(item: OutputItem) -> bool:
    """Tell whether ``item`` is something that was said: a call cut short never was one."""
    return not (_is_call(item) and item.status == "incomplete")


def _padding() -> str:
    """Return random text that hides how long a delta is."""
    return secrets.token_urlsafe(secrets.randbelow(16))
