"""Token ids in, token ids out, in vLLM in this process (``AsyncLLM``), with its cache kept.

Each run is one resumable request (``request``): while it is suspended, its keys and values
stay where they are, and to resume is to send the pending token and the suffix. What may be held
like that is bounded (``held``), by count, by blocks and by time. A run whose request was ended
goes on in a new one, of all of its tokens, which finds in vLLM's prefix cache what nobody else
needed. The token log is the truth, so that makes no difference to what is said.

Sampling is ours (``processor``), in vLLM's process: the same tokens as from an engine of ours
that comes to the same logits, by seed and position, with the same grammars.

If vLLM's engine dies, all its runs fail, and those that come later fail at once: the server has to
be started again. vLLM samples on whether or not anybody reads; what waits for a slow client is
bounded by the length of the context.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from uuid import uuid4

from sampler.cache_pool import MemoryUse
from sampler.capabilities import Capabilities
from sampler.engine_error import EngineError, failure_of
from sampler.engines.vllm.arguments import engine_arguments
from sampler.engines.vllm.held import Held, Room, new_policy, room_of, surplus
from sampler.engines.vllm.library import Library, Llm, load_library
from sampler.engines.vllm.processor import PLAN, SegmentPlan, failure_id_of
from sampler.engines.vllm.request import Chunk, RequestState, ResumableRequest, Turn
from sampler.language import LoadedLanguage, first_line
from sampler.matcher import Matcher
from sampler.run import Run, StopReason
from sampler.snapshot import Sources
from sampler.suspension import Suspension
from sampler.suspension_policy import Kind, Parked
from sampler.token_backend import Session, TokenBackend
from sampler.token_channel import Mailbox, TokenChannel
from sampler.token_engine import TokenEngine
from sampler.worker_thread import WorkerThread

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.1
"""How long more may be held than is allowed, after a turn: most runs are over then."""


def vllm_engine(
    model: str | Path,
    language: LoadedLanguage,
    *,
    engine_args: Mapping[str, object] | None = None,
    language_source: str | Path | None = None,
    suspended_fraction: float = 0.5,
    suspend_ttl_seconds: float = 600.0,
    max_forced_string: int = 64,
    library: Library | None = None,
) -> TokenEngine:
    """Return an engine that samples ``model`` in vLLM, which starts with it.

    Args:
        model: a directory, or an id of the hub.
        language: how it is spoken to (``load_language``).
        engine_args: vLLM's, by name.
        language_source: what ``language`` was loaded from; by default ``model``.
        suspended_fraction: the most of vLLM's cache that suspended runs may hold.
        suspend_ttl_seconds: how long one of them may.
        max_forced_string: see ``GrammarCompiler``.
        library: vLLM; by default the one that is installed.

    Raises:
        VllmError: it is not installed, or an engine argument cannot be had.
    """
    settings = {
        "language": str(language_source or model),
        "max_forced_string": max_forced_string,
    }
    arguments = engine_arguments(str(model), engine_args or {}, settings)
    library = library or load_library()
    backend = VllmBackend(
        library,
        partial(library.make_llm, arguments),
        language,
        suspended_fraction=suspended_fraction,
        suspend_ttl_seconds=suspend_ttl_seconds,
    )
    return TokenEngine(language, backend, max_forced_string=max_forced_string)


class VllmBackend(TokenBackend):
    """vLLM's engine, and the requests that it has."""

    capabilities = Capabilities(
        keeps_kv=True, token_exact=True, drops_pending_token=True, grammar=True
    )

    def __init__(
        self,
        library: Library,
        make_llm: Callable[[], Llm],
        language: LoadedLanguage,
        *,
        suspended_fraction: float,
        suspend_ttl_seconds: float,
    ) -> None:
        """Prepare; ``start`` makes the engine.

        Args:
            library: what to speak to it with.
            make_llm: makes it, on any thread.
            language: how its model is spoken to.
            suspended_fraction: see ``vllm_engine``.
            suspend_ttl_seconds: see ``vllm_engine``.
        """
        self.counters = language.tokenizer.counters
        self.library = library
        self._make_llm = make_llm
        self._language = language
        self._suspended_fraction = suspended_fraction
        self._suspend_ttl_seconds = suspend_ttl_seconds
        self._stop_ids = language.tokenizer.stop_ids
        self._failure_id = failure_id_of(language.tokenizer)
        self._llm: Llm | None = None
        self._room: Room | None = None
        self._policy = new_policy(prefill_chunk=256)
        self._requests: dict[ResumableRequest, _VllmSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count(1)
        self._check: asyncio.TimerHandle | None = None
        self._expiries: dict[ResumableRequest, asyncio.TimerHandle] = {}

    @property
    def max_context(self) -> int:
        """What the model was made for and, once it has started, what vLLM has memory for."""
        return (self._language.max_context or 0) if self._room is None else self._room.max_context

    @property
    def kv_tokens(self) -> int:
        return sum(request.num_positions for request in self._requests)

    @property
    def memory(self) -> MemoryUse:
        """What the blocks are used for, as if no two runs shared any."""
        if self._room is None:
            return MemoryUse(0, 0, 0, 0)
        used = sum(self._room.blocks_for(request.num_positions) for request in self._requests)
        return MemoryUse(self._room.num_blocks, min(used, self._room.num_blocks), 0, 0)

    @property
    def failure(self) -> str | None:
        """Why no run can be sampled; None if they can."""
        if self._llm is None:
            return "vLLM's engine has not been started"
        if self._llm.errored:
            return "vLLM's engine has died; the server has to be started again"
        return None

    # --- Life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM's processes, which takes as long as it takes to load the model.

        Raises:
            EngineError: they did not start.
        """
        starting = WorkerThread("vllm")
        try:
            self._llm = await starting.run(self._make_llm)
        except Exception as error:
            raise failure_of(error, f"vLLM did not start: {first_line(error)}") from error
        finally:
            starting.close()
        self._room = room_of(self._llm.vllm_config, self._suspended_fraction)
        held = self._room.max_held_blocks * self._room.block_size
        if not self._room.max_held_blocks or not self._room.max_held_sequences:
            logger.warning("vLLM has no memory to keep the caches of suspended runs in")
        logger.info("suspended runs may hold %d tokens of vLLM's cache", held)

    async def stop(self) -> None:
        """End vLLM's processes. Runs must be over."""
        for request in list(self._requests):
            request.end()
        if self._check is not None:
            self._check.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def close(self) -> None:
        pass  # its processes end with the event loop's

    # --- Runs -------------------------------------------------------------------------------------

    def new_session(self, run: Run, sources: Sources) -> "_VllmSession":
        return _VllmSession(run, self, _salt(sources))

    def begin_turn(self, session: "_VllmSession", *, is_bound: bool) -> None:
        """Have the run of ``session`` sampled on, in its request or in a new one.

        Args:
            session: whose log has all that comes before, and whose channel is open.
            is_bound: whether a grammar binds the turn.

        Raises:
            EngineError: it cannot be.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        llm, room, run = self._llm, self._room, session.run
        assert llm is not None, "it was started"
        assert room is not None, "it was started"
        num_left = room.max_context - len(run.tokens)
        if num_left < 1:  # vLLM does not look, and would die of it
            raise EngineError("the context is full", "context_length_exceeded")
        wanted = run.params.max_output_tokens
        is_limited = wanted is not None and wanted <= num_left
        is_planned = is_bound or run.params.temperature > 0 or run.params.has_penalties
        request = session.request
        num_cached = None if request is None else request.num_tokens
        turn = Turn(
            run,
            session.channel,
            StopReason.MAX_OUTPUT_TOKENS if is_limited else StopReason.CONTEXT_LENGTH,
            self._failure_id if is_planned else None,
            num_cached,
        )
        chunk = Chunk(
            run.tokens.since(num_cached or 0),
            self._sampling_params(run, min(wanted or num_left, num_left), is_planned=is_planned),
            session.salt,
        )
        turn.segment.started_at = time.monotonic()
        if request is None:
            task = self._open(session, llm).start(chunk, turn)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._drop_expiry(request)
            request.resume(chunk, turn)

    def _open(self, session: "_VllmSession", llm: Llm) -> ResumableRequest:
        request = ResumableRequest(
            f"{session.run.id}-{next(self._numbers)}",
            llm,
            self.library,
            self._stop_ids,
            self._turn_ended,
            self._forget,
        )
        self._requests[request] = session
        session.request = request
        return request

    def _sampling_params(self, run: Run, max_tokens: int, *, is_planned: bool) -> object:
        plan = SegmentPlan(run.params, run.constraint, run.segments[-1].input_tokens)
        return self.library.sampling_params(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=sorted(self._stop_ids),
            ignore_eos=True,  # it is among them, if it ends turns
            detokenize=False,
            logprobs=run.params.top_logprobs,  # of a run, so the same for all of a request
            output_kind=self.library.delta,
            extra_args={PLAN: plan.encode()} if is_planned else None,
        )

    def _turn_ended(self, request: ResumableRequest, turn: Turn) -> None:
        self._account(turn)
        if request.state is RequestState.ENDED:
            return
        loop = asyncio.get_running_loop()
        self._expiries[request] = loop.call_later(self._suspend_ttl_seconds, self._evict, request)
        if self._check is None and self._surplus():
            self._check = loop.call_later(_PATIENCE_SECONDS, self.check)

    def _account(self, turn: Turn) -> None:
        """Put down what was forwarded, as far as vLLM tells."""
        if not turn.num_sampled or turn.num_cached is None:
            return
        run, segment, start, stop = turn.run, turn.segment, turn.num_cached, turn.num_forwarded
        segment.cached_tokens = start
        run.num_inherited += max(start - run.num_forwarded, 0)
        self.counters.tokens_reforwarded += run.record_forward(start, stop)
        self.counters.tokens_forwarded += stop - start
        if segment.started_at is not None and segment.first_token_at is not None:
            num_read = segment.input_tokens - start
            self._policy.costs.observe_forward(
                num_read, segment.first_token_at - segment.started_at
            )

    # --- Bounds -----------------------------------------------------------------------------------

    def observe_tools(self, tools: tuple[str, ...], seconds: float) -> None:
        """Learn that ``tools`` took so long."""
        self._policy.tool_times.observe(tools, seconds)

    def check(self) -> None:
        """Make sure that no more is held than may be."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        for request in self._surplus():
            self._evict(request)

    def _surplus(self) -> list[ResumableRequest]:
        assert self._room is not None, "there are requests"
        states = RequestState
        held = [
            Held(self._parked(request, session, self._room), request.state is states.PAUSED)
            for request, session in self._requests.items()
            if request.state in (states.PAUSED, states.RESUMED)
        ]
        running = (r.num_positions for r in self._requests if r.state is states.SAMPLED)
        ends = surplus(held, self._room, self._policy, time.monotonic(), sum(running))
        keys = {parked.key for parked in ends}
        return [request for request in self._requests if request in keys]

    def _parked(self, request: ResumableRequest, session: "_VllmSession", room: Room) -> Parked:
        return Parked(
            request,
            Kind.SUSPENDED,
            request.num_tokens,
            room.blocks_for(request.num_tokens + 1),
            request.paused_at,
            session.tools,
        )

    def _evict(self, request: ResumableRequest) -> None:
        """End a request that is paused; its run goes on in another one."""
        self.counters.discards += 1
        request.end()

    def _forget(self, request: ResumableRequest) -> None:
        self._drop_expiry(request)
        self._requests.pop(request).request = None

    def _drop_expiry(self, request: ResumableRequest) -> None:
        if expiry := self._expiries.pop(request, None):
            expiry.cancel()


class _VllmSession(Session):
    """A run, and its request while it has one."""

    def __init__(self, run: Run, backend: VllmBackend, salt: str | None) -> None:
        self.run = run
        self.salt = salt
        self.request: ResumableRequest | None = None
        self.tools: tuple[str, ...] = ()
        """What it waits for."""
        self._backend = backend

    def expect(self) -> None:
        self.channel = TokenChannel(Mailbox(), max(self._backend.max_context, 1))

    def start(self, matcher: Matcher | None) -> None:
        # The matcher is of this process; vLLM's has one of its own.
        try:
            self._backend.begin_turn(self, is_bound=matcher is not None)
        except EngineError as error:
            self.channel.deliver(error.with_traceback(None))

    def took(self, num_messages: int) -> None:
        self.channel.num_taken += num_messages

    async def stop(self, num_tokens: int) -> None:
        self.let_go()  # the log has what stays, and a new request begins with it

    def end_segment(self) -> None:
        pass  # nobody waits for that

    def suspend(self, suspension: Suspension) -> None:
        self.tools = _tools(suspension)
        self._backend.check()

    def resume(self, suspension: Suspension, seconds: float) -> None:
        self.tools = ()
        self._backend.observe_tools(_tools(suspension), seconds)

    def snapshot(self) -> None:
        return None  # prefixes are shared inside of vLLM

    def let_go(self) -> None:
        if self.request is not None:
            self.request.end()


def _salt(sources: Sources) -> str | None:
    if not sources.reuses_prefixes:
        return uuid4().hex  # of this run alone
    if sources.salt is None:
        return None
    return blake2b(repr(sources.salt).encode(), digest_size=16).hexdigest()


def _tools(suspension: Suspension) -> tuple[str, ...]:
    return tuple(call.qualified_name for call in suspension.calls)
