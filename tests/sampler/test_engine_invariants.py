"""Whatever happens around a run, it says what it says alone, and nothing stays behind.

A machine plays many clients of one engine, by a schedule that hypothesis draws: runs come, suspend,
go on, are steered and cancelled, in a pool that holds one of them or all; consumers are slow, swap
files get damaged, steps fail. Mostly each step of the model waits until the schedule lets it go, so
that a failing example can be played again and made smaller; where it does not, the threads race.

What runs say depends on all that they have read: the weights are large, and where a text may end
or calls may come, the model and the seed choose. Each run's tokens are compared to those of the
same run alone in an engine with plenty of memory. The runners are exact, so they must be equal.
"""

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from protocol.items import Message
from protocol.tools import FunctionTool
from sampler.cache_pool import BlockPool
from sampler.decoder_weights import DecoderWeights
from sampler.engine import ContextLengthExceededError, EngineError, Resumption
from sampler.kv_cache import KVCache
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import GenericRunner, ModelRunner, Piece, RunnerWrapper
from sampler.outputs import Output, SegmentEnded
from sampler.params import Constraint, SamplingParams
from sampler.run import Run, RunState, StopReason
from sampler.sampling import Certain
from sampler.snapshot import Snapshot, Sources
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode
from sampler.torch_decoder import TorchDecoder
from tests.sampler.cpu_decoders import covered_model, new_decoder, new_storage
from tests.sampler.decoders import known_weights
from tests.sampler.families import FAMILIES, family
from tests.sampler.runs import (
    AND_CALL_ROME,
    CALL_OSLO,
    CALL_ROME,
    VOCAB_SIZE,
    let_the_loop_turn,
    resume_with,
    steered_model,
)
from tests.tiny_model import IM_END, WEATHER

DEADLINE_SECONDS = 10.0
PLENTY = 512
"""Blocks."""
MAX_CONTEXT = 256

# --- Models ---------------------------------------------------------------------------------------


@cache
def _loaded() -> LoadedModel:
    return steered_model(MAX_CONTEXT)


@cache
def _family(name: str) -> PreTrainedModel:
    options = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT}
    # In float64 a prompt gives the same whether it is read in one piece or in several, but for what
    # is far too small to tip the scales.
    return family(name, {**FAMILIES[name], **options}).double()


@cache
def _weights() -> DecoderWeights:
    return known_weights(covered_model(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_CONTEXT))


def _generic(name: str, num_blocks: int) -> ModelRunner:
    return GenericRunner(_family(name), pool=BlockPool(num_blocks), is_exact=True)


def _torch(num_blocks: int) -> ModelRunner:
    return TorchDecoder(
        _weights(), new_storage(_weights(), torch.float32, num_blocks), is_exact=True
    )


def _compiled(form: str, num_blocks: int) -> ModelRunner:
    return new_decoder(_weights(), form, num_blocks)


RUNNERS: dict[str, Callable[[int], ModelRunner]] = {
    "generic": partial(_generic, "Llama"),
    "generic, window": partial(_generic, "Mistral"),
    "generic, convolutions": partial(_generic, "Lfm2"),
    "torch": _torch,
    "compiled, float32": partial(_compiled, "float32"),
    "compiled, int8": partial(_compiled, "int8"),
}
"""Each given the number of blocks of its pool."""

_END_OF_THOUGHTS = "</think>"
_PERIOD = 40


@cache
def _choices() -> dict[int, Sequence[int]]:
    """Return among which tokens the weights choose, by position in a cycle; letters elsewhere."""
    encode = _loaded().tokenizer.encode_text
    letters = encode("efghijklmnopqrstuvwxyz")
    spelled = {8 + i: encode(c) for i, c in enumerate(_END_OF_THOUGHTS)}
    return {
        **dict.fromkeys(range(_PERIOD), letters),
        **spelled,
        4: [IM_END, *letters[:4]],
        18: [IM_END, *letters[:4]],
        25: [CALL_OSLO, CALL_ROME, *letters[:2]],
        26: [AND_CALL_ROME, IM_END],
        27: [IM_END],
        36: [IM_END, *letters[:4]],
    }


# --- The runner that is watched -------------------------------------------------------------------


class Failure(Enum):
    """How a step fails."""

    BEFORE = auto()
    AFTER = auto()
    """All is forwarded, and the logits are lost."""
    HALF_WAY = auto()
    """Some of it is."""
    BROKEN = auto()
    """Half way through a cache."""
    OUT_OF_MEMORY = auto()
    OUT_OF_MEMORY_AFTER = auto()

    @property
    def error(self) -> Exception:
        if self in (Failure.OUT_OF_MEMORY, Failure.OUT_OF_MEMORY_AFTER):
            return MemoryError("no memory left")
        return RuntimeError("a failure that was asked for")


class HeldRunner(RunnerWrapper):
    """Another runner, whose steps are let go one by one, may fail, and are looked into."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.pool = runner.new_cache().table.pool
        self.failures: deque[Failure] = deque()
        """What the next steps fail with."""
        self.at_gate: Sequence[Piece] | None = None
        """What waits to be let go."""
        self.is_held = False
        """Whether steps wait to be let go at all."""
        self.mistakes: list[BaseException] = []
        """What was found to be wrong on the model thread."""
        self.num_forwarded = 0
        """Tokens of all pieces that went through."""
        self.on_arrival: Callable[[], object] = lambda: None
        self._gate = threading.Condition()

    def let_go(self) -> None:
        """Let the step pass that is at the gate."""
        with self._gate:
            self.at_gate = None
            self._gate.notify()

    def hold_no_more(self) -> None:
        """Let all steps pass from now on, and let none fail."""
        with self._gate:
            self.failures.clear()
            self.is_held = False
            self.at_gate = None
            self._gate.notify()

    def forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        self._note_mistakes(pieces)
        with self._gate:
            if self.is_held:
                self.at_gate = pieces
                self.on_arrival()
                self._gate.wait_for(lambda: self.at_gate is None)
        if self.failures:
            self._fail(pieces, self.failures.popleft())
        return self._forward(pieces)

    def _fail(self, pieces: Sequence[Piece], failure: Failure) -> None:
        match failure:
            case Failure.AFTER | Failure.OUT_OF_MEMORY_AFTER:
                self._forward(pieces)
            case Failure.HALF_WAY if len(pieces) > 1:
                self._forward(pieces[: len(pieces) // 2])
            case Failure.BROKEN:
                pieces[0].cache.is_broken = True
            case _:
                pass
        raise failure.error

    def _forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        logits = self._runner.forward(pieces)
        self.num_forwarded += sum(len(piece.token_ids) for piece in pieces)
        self._note_mistakes(pieces)
        return [_steered(one, piece.cache) for one, piece in zip(logits, pieces, strict=True)]

    def _note_mistakes(self, pieces: Sequence[Piece]) -> None:
        try:
            self.pool.check()
            assert len({id(piece.cache) for piece in pieces}) == len(pieces), "one step each"
            for piece in pieces:
                assert not piece.cache.is_broken
                assert not piece.cache.is_swapped
                assert piece.token_ids
        except AssertionError as error:
            self.mistakes.append(error)


def _steered(logits: object, cache: KVCache) -> Tensor | None:
    assert not isinstance(logits, Certain)
    if not isinstance(logits, Tensor):
        return None
    choice = list(_choices()[cache.num_tokens % _PERIOD])
    # Not so little that what a grammar would rather have is all the same.
    steered = logits - 1000
    steered[choice] = logits[choice]
    return steered


# --- Runs -----------------------------------------------------------------------------------------

CITY = FunctionTool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
CONSTRAINTS = {
    "free": Constraint(),
    "auto": Constraint((WEATHER,)),
    "forced": Constraint((CITY,), min_calls=1, max_calls=1),
    "thinking": Constraint((WEATHER,), thinks=True, think_is_open=True),
}


@dataclass(frozen=True)
class Answer:
    """What a client appends."""

    output: str
    message: str | None
    constraint: str


@dataclass(frozen=True)
class Wanted:
    """What is asked of a run; it decides its tokens."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    constraint: str


@dataclass(eq=False)
class Client:
    """One run, and who plays it."""

    engine: LocalEngine
    run: Run
    wanted: Wanted
    is_slow: bool = False
    answers: list[Answer] = field(default_factory=list)
    """What was appended."""
    waiting: "asyncio.Future[Answer | None] | None" = None
    """Set while the run is suspended."""
    suspension: Suspension | None = None
    task: "asyncio.Task[None] | None" = None
    error: str | None = None
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    was_hit: bool = False
    """Whether a failure was injected that may end it."""
    was_cancelled: bool = False
    keeps: list[Snapshot] | None = None
    """Where to put snapshots of the ends of segments."""

    async def play(self) -> None:
        """Sample the run to its end."""
        try:
            async with aclosing(self.engine.sample(self.run, self._answer)) as outputs:
                async for output in outputs:
                    self._note(output)
                    if self.is_slow:
                        self.may_go_on.clear()
                        await self.may_go_on.wait()
        except EngineError as error:
            self.error = f"{error} ({error.__cause__!r})"

    def _note(self, output: Output) -> None:
        if not isinstance(output, SegmentEnded):
            return
        if output.suspension is not None:
            held = self.engine.snapshot(self.run).cache.num_tokens
            assert held in (len(self.run.tokens) - 1, 0), "the last token is pending"
        if self.keeps is not None:
            self.keeps.append(self.engine.snapshot(self.run))

    async def _answer(self, suspension: Suspension) -> Resumption | None:
        assert suspension.num_tokens == len(self.run.tokens)
        self.suspension = suspension
        self.waiting = asyncio.get_running_loop().create_future()
        try:
            answer = await self.waiting
        finally:
            self.waiting = None
        if answer is None:
            return None
        messages = [Message("user", answer.message)] if answer.message else []
        answered = suspension.answer(dict.fromkeys(suspension.awaited, answer.output), messages)
        constraint = CONSTRAINTS[answer.constraint]
        with suppress(ContextLengthExceededError):
            resumption = await resume_with(self.engine, self.run, answered, constraint)
            self.answers.append(answer)
            return resumption
        return None

    def answer(self, answer: Answer | None) -> None:
        """Append; None for a client that is gone."""
        assert self.waiting is not None
        if not self.waiting.done():
            self.waiting.set_result(answer)

    @property
    def is_at_work(self) -> bool:
        """Whether it will be handed to the model before anybody else does anything."""
        return (
            self.task is not None
            and not self.task.done()
            and not self.run.is_finished
            and self.run.state is not RunState.SUSPENDED
            and self.run.segments[-1].handed_at is None
            and not (self.is_slow and not self.may_go_on.is_set())
        )


class Alone:
    """Runs by themselves, with plenty of memory, one after the other."""

    def __init__(self, kind: str) -> None:
        self._engine = new_engine(
            HeldRunner(RUNNERS[kind](PLENTY)), reuse_prefixes=False, gathering_seconds=0
        )
        self._known: dict[tuple[Wanted, tuple[Answer, ...]], tuple[int, ...]] = {}

    async def tokens(self, wanted: Wanted, answers: Sequence[Answer]) -> tuple[int, ...]:
        """Return the log of the run that is answered so, and then left alone."""
        key = wanted, tuple(answers)
        if key not in self._known:
            self._known[key] = await self._sample(wanted, deque(answers))
        return self._known[key]

    async def _sample(self, wanted: Wanted, answers: deque[Answer]) -> tuple[int, ...]:
        run = self._engine.open_run(
            "alone", wanted.prompt_ids, wanted.params, CONSTRAINTS[wanted.constraint]
        )

        async def call_tools(suspension: Suspension) -> Resumption | None:
            if not answers:
                return None
            answer = answers.popleft()
            messages = [Message("user", answer.message)] if answer.message else []
            outputs = dict.fromkeys(suspension.awaited, answer.output)
            answered = suspension.answer(outputs, messages)
            return await resume_with(self._engine, run, answered, CONSTRAINTS[answer.constraint])

        async with aclosing(self._engine.sample(run, call_tools)) as outputs:
            async for _ in outputs:
                pass
        return run.tokens.ids

    def close(self) -> None:
        self._engine.close()


_ALONE: dict[str, Alone] = {}


def alone(kind: str) -> Alone:
    """Return that of a kind of runner, which is kept, with what it knows."""
    if kind not in _ALONE:
        _ALONE[kind] = Alone(kind)
    return _ALONE[kind]


@pytest.fixture(scope="module", autouse=True)
def close_all() -> Iterator[None]:
    yield
    for one in _ALONE.values():
        one.close()
    _ALONE.clear()


def new_engine(runner: HeldRunner, **options: Any) -> LocalEngine:
    model = _loaded()
    model.tokenizer.counters = runner.counters
    return LocalEngine(replace(model, runner=runner), **options)


# --- The machine ----------------------------------------------------------------------------------

_SHARED_IDS = tuple(
    torch.randint(3, 259, (96,), generator=torch.Generator().manual_seed(4)).tolist()
)

_prompts = st.builds(
    lambda num_shared, own: (*_SHARED_IDS[:num_shared], *own),
    st.sampled_from([0, 1, 15, 16, 17, 32, 33, 48, 70, 96]),
    st.lists(st.sampled_from([5, 70, 200]), min_size=1, max_size=3).map(tuple),
)
_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.0]),
    seed=st.integers(0, 3),
    top_p=st.sampled_from([1.0, 0.9]),
    max_output_tokens=st.sampled_from([None, 60, 40, 17, 2, 1]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
)
_constraints = st.sampled_from(list(CONSTRAINTS))
_answers = st.builds(
    Answer,
    output=st.sampled_from(["", "sunny", "rain, and then more rain, and wind"]),
    message=st.sampled_from([None, "And?"]),
    constraint=_constraints,
)
_index = st.integers(0, 5)


class _Mistakes(logging.Handler):
    """Notes what the model thread swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "made a mistake" in record.getMessage():
            self.texts.append(logging.Formatter().format(record))


@dataclass(frozen=True)
class Setting:
    """What an engine is made with."""

    num_blocks: int
    mode: Mode
    prefill_chunk: int
    max_rows: int
    swap_bytes: int | None
    reuse_prefixes: bool
    patience: float
    gathering: float
    is_held: bool
    """Whether steps are taken one by one; if not, at any time, and none is made to fail."""


@dataclass(frozen=True)
class Action:
    """Something that happens; where it cannot, nothing does."""

    name: str
    """Of a method of ``Machine``."""
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


class Machine:
    """Plays the clients of one engine."""

    def __init__(self, kind: str, setting: Setting) -> None:
        self.kind = kind
        self.setting = setting
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._note_exception)
        self.directory = TemporaryDirectory()
        self.complaints: list[str] = []
        self.clients: list[Client] = []
        self.snapshots: list[Snapshot] = []
        self.warm_ups: list[asyncio.Task[None]] = []
        self.warmed_up: list[Snapshot] = []
        self.num_warm_ups = 0
        self.failures_were_armed = False
        self.hit_a_warm_up = False
        self.mistakes = _Mistakes()
        logger = logging.getLogger("sampler")
        logger.addHandler(self.mistakes)
        # What is logged here is no news, and records that are kept keep what failed.
        logger.propagate = False
        self.runner = HeldRunner(RUNNERS[kind](setting.num_blocks))
        self.runner.is_held = setting.is_held
        self.arrived = asyncio.Event()
        self.runner.on_arrival = self._note_arrival
        with mock.patch("sampler.local_engine.PATIENCE_SECONDS", setting.patience):
            self.engine = new_engine(
                self.runner,
                prefill_chunk=setting.prefill_chunk,
                max_rows=setting.max_rows,
                suspend_policy=setting.mode,
                swap_directory=Path(self.directory.name),
                swap_bytes=setting.swap_bytes,
                reuse_prefixes=setting.reuse_prefixes,
                gathering_seconds=setting.gathering,
            )

    def play(self, actions: Sequence[Action]) -> None:
        """Let ``actions`` happen, and then all that was begun end."""
        try:
            for action in actions:
                getattr(self, action.name)(**action.arguments)
                self.check()
            self._end()
        finally:
            self._close()

    def _note_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.complaints.append(f"{context['message']}: {context.get('exception')!r}")

    def _note_arrival(self) -> None:
        """Model thread."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.arrived.set)

    # --- What clients do ---

    def open_run(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        constraint: str,
        salt: str,
        reuses: bool,
        is_slow: bool,
        keeps: bool,
        uses: list[int],
    ) -> None:
        snapshots = [s for i, s in enumerate(self.snapshots) if i in uses]
        sources = Sources(snapshots, salt, reuses)
        self._open(Wanted(prompt_ids, params, constraint), sources, is_slow=is_slow, keeps=keeps)

    def follow(
        self, index: int, num_cut: int, params: SamplingParams, constraint: str, keeps: bool
    ) -> None:
        """Open a run that goes on from a snapshot."""
        if not self.snapshots:
            return
        snapshot = self.snapshots[index % len(self.snapshots)]
        token_ids = snapshot.token_ids
        wanted = Wanted((*token_ids[: len(token_ids) - num_cut], 70, 5), params, constraint)
        self._open(wanted, Sources([snapshot], "a"), is_slow=False, keeps=keeps)

    def _open(self, wanted: Wanted, sources: Sources, *, is_slow: bool, keeps: bool) -> None:
        if len(wanted.prompt_ids) > MAX_CONTEXT - 64:
            return
        try:
            run = self.engine.open_run(
                f"run {len(self.clients)}",
                wanted.prompt_ids,
                wanted.params,
                CONSTRAINTS[wanted.constraint],
                sources,
            )
        except ContextLengthExceededError:
            assert len(wanted.prompt_ids) >= self.engine.max_context
            return
        client = Client(self.engine, run, wanted, is_slow=is_slow)
        client.keeps = self.snapshots if keeps else None
        client.task = self.loop.create_task(client.play())
        self.clients.append(client)
        self._settle()

    def step(self, number: int) -> None:
        """Let the model take some steps."""
        if not self.setting.is_held:
            self.loop.run_until_complete(asyncio.sleep(number / 2000))
            return
        for _ in range(number):
            self._settle()
            if self.runner.at_gate is None:
                return
            self._note_hits()
            self.runner.let_go()
            self._settle()

    def append(self, index: int, answer: Answer, settles: bool) -> None:
        if not self._suspended():
            return
        suspended = self._suspended()
        suspended[index % len(suspended)].answer(answer)
        if settles:
            self._settle()

    def abandon(self, index: int) -> None:
        if not self._suspended():
            return
        client = self._suspended()[index % len(self._suspended())]
        client.was_cancelled = True
        client.answer(None)
        self._settle()

    def cancel(self, index: int, settles: bool) -> None:
        if not self._live():
            return
        client = self._live()[index % len(self._live())]
        assert client.task is not None
        client.was_cancelled = True
        client.task.cancel()
        if settles:
            self._settle()

    def wish(self, index: int, wish: StopReason) -> None:
        if not self._live():
            return
        client = self._live()[index % len(self._live())]
        client.was_cancelled = True
        client.run.wanted_stop = wish

    def come_back(self, index: int, gets_faster: bool) -> None:
        """Let a slow consumer go on."""
        slow = [client for client in self._live() if client.is_slow]
        if not slow:
            return
        client = slow[index % len(slow)]
        client.is_slow = not gets_faster
        client.may_go_on.set()
        self._settle()

    def take_snapshot(self, index: int) -> None:
        if not self._suspended():
            return
        client = self._suspended()[index % len(self._suspended())]
        self.snapshots.append(self.engine.snapshot(client.run))

    def drop_snapshot(self, index: int) -> None:
        if not self.snapshots:
            return
        del self.snapshots[index % len(self.snapshots)]

    def warm_up(
        self,
        prompt_ids: tuple[int, ...],
        keeps: bool,
        starts_from_others: bool,
        is_cancelled: bool,
    ) -> None:
        if len(prompt_ids) >= self.engine.max_context:
            return
        snapshot = self.engine.new_snapshot(prompt_ids)
        others = tuple(self.snapshots) if starts_from_others else ()
        if keeps:
            self.snapshots.append(snapshot)
            self.warmed_up.append(snapshot)
        self._begin_to_warm_up(snapshot, others, is_cancelled=is_cancelled)

    def warm_up_again(self, index: int, is_cancelled: bool) -> None:
        """Go on with one that may have been cancelled."""
        if not self.warmed_up or not all(warm_up.done() for warm_up in self.warm_ups):
            return
        snapshot = self.warmed_up[index % len(self.warmed_up)]
        self._begin_to_warm_up(snapshot, (), is_cancelled=is_cancelled)

    def _begin_to_warm_up(
        self, snapshot: Snapshot, others: Sequence[Snapshot], *, is_cancelled: bool
    ) -> None:
        warm_up = self.loop.create_task(self._warm_up(snapshot, others))
        self.warm_ups.append(warm_up)
        self.num_warm_ups += 1
        if is_cancelled:
            self.loop.run_until_complete(let_the_loop_turn())
            warm_up.cancel()
        self._settle()

    async def _warm_up(self, snapshot: Snapshot, others: Sequence[Snapshot]) -> None:
        try:
            await self.engine.warm_up(snapshot, others)
        except EngineError as error:
            if not self.hit_a_warm_up:
                self.complaints.append(f"a warm-up failed: {error} {error.__cause__!r}")

    def cancel_warm_up(self, index: int) -> None:
        if not self.warm_ups:
            return
        self.warm_ups[index % len(self.warm_ups)].cancel()
        self._settle()

    # --- What goes wrong ---

    def arm(self, failures: list[Failure]) -> None:
        """Let the next steps fail."""
        if not self.setting.is_held:
            return
        self.failures_were_armed = True
        self.runner.failures.extend(failures)

    def spoil_swap_files(self, how: str) -> None:
        if not self.setting.is_held:
            return  # files come and go meanwhile
        self.failures_were_armed = True
        for path in self._swap_files():
            content = path.read_bytes()
            match how:
                case "damage":
                    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
                case "truncate":
                    path.write_bytes(content[: len(content) // 2])
                case _:
                    path.unlink()

    def _note_hits(self) -> None:
        """Say who may fail by the step that is at the gate."""
        pieces, failures = self.runner.at_gate, self.runner.failures
        if not failures or pieces is None:
            return
        if failures[0] is Failure.BROKEN or len(pieces) == 1:
            hit = [pieces[0].cache]
        else:
            return
        owners = [c for c in self.clients if self._cache_of(c) in hit]
        for client in owners:
            client.was_hit = True
        self.hit_a_warm_up |= not owners

    def _cache_of(self, client: Client) -> KVCache | None:
        with suppress(KeyError):
            return self.engine.snapshot(client.run).cache
        return None

    # --- What always holds ---

    def check(self) -> None:
        assert not self.mistakes.texts, self.mistakes.texts[0]
        assert not self.complaints, self.complaints
        if self.runner.mistakes:
            raise self.runner.mistakes[0]
        for client in self.clients:
            if client.task is not None and client.task.done() and not client.task.cancelled():
                client.task.result()
            self._check_failure(client)

    def _check_failure(self, client: Client) -> None:
        assert client.error is None or client.was_hit, client.error

    # --- The end ---

    def _close(self) -> None:
        self.runner.hold_no_more()
        self.engine.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(let_the_loop_turn())
        self.loop.close()
        self.directory.cleanup()
        logger = logging.getLogger("sampler")
        logger.removeHandler(self.mistakes)
        logger.propagate = True

    def _end(self) -> None:
        self.runner.hold_no_more()
        self.loop.run_until_complete(self._play_to_the_end())
        self.check()
        for client in self.clients:
            self._check_end(client)
        self._check_counts()
        self.loop.run_until_complete(self._check_tokens())
        self.loop.run_until_complete(self._check_that_all_can_be_had())
        self.snapshots.clear()
        self.clients.clear()
        self.warm_ups.clear()
        self.warmed_up.clear()
        self.loop.run_until_complete(self._check_that_nothing_is_held())

    async def _play_to_the_end(self) -> None:
        tasks = [client.task for client in self.clients if client.task is not None]
        ending = asyncio.gather(*tasks, *self.warm_ups, return_exceptions=True)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not ending.done():
                    for client in self.clients:
                        client.is_slow = False
                        client.may_go_on.set()
                        if client.waiting is not None:
                            enough = len(client.answers) > 2
                            client.answer(Answer("end", None, "free" if enough else "auto"))
                    await asyncio.wait([ending], timeout=0.001)
        except TimeoutError:
            states = [(c.run.id, c.run.state.name, len(c.run.tokens)) for c in self.clients]
            warm_ups = [task.done() for task in self.warm_ups]
            memory = self.engine.memory
            raise AssertionError(f"not all ends: {states} {warm_ups} {memory}") from None

    def _check_end(self, client: Client) -> None:
        run = client.run
        assert run.is_finished or run.state is RunState.QUEUED
        reason = run.segments[-1].stop_reason
        if reason is StopReason.CONTEXT_LENGTH:
            assert len(run.tokens) == self.engine.max_context
        if client.error is not None:
            assert run.state is RunState.FAILED
        elif not client.was_cancelled:
            assert run.state in (RunState.COMPLETED, RunState.INCOMPLETE, RunState.CANCELLED)
        if run.state is RunState.COMPLETED:
            assert run.num_forwarded == len(run.tokens) - 1, "each position but the last"

    def _check_counts(self) -> None:
        counters = self.engine.counters
        assert counters.tokens_forwarded == self.runner.num_forwarded
        runs = [client.run for client in self.clients]
        assert counters.tokens_reforwarded == sum(run.tokens_reforwarded for run in runs)
        if self.failures_were_armed or self.num_warm_ups:
            return
        done = sum(run.num_forwarded - run.num_inherited + run.tokens_reforwarded for run in runs)
        assert counters.tokens_forwarded <= done
        if not any(run.num_inherited for run in runs):
            assert counters.tokens_forwarded == done

    async def _check_tokens(self) -> None:
        for client in self.clients:
            run = client.run
            if run.state is RunState.FAILED or run.num_forwarded == 0:
                continue
            expected = await alone(self.kind).tokens(client.wanted, client.answers)
            said = run.tokens.ids
            if run.state is RunState.COMPLETED:
                assert said == expected, f"{run.id} says something else than alone"
            assert said == expected[: len(said)], f"{run.id} says something else than alone"

    async def _check_that_all_can_be_had(self) -> None:
        """Nothing that is kept stands in the way of a run that needs the whole pool."""
        if self.engine.max_context == MAX_CONTEXT:
            return
        params = SamplingParams(max_output_tokens=1)
        run = self.engine.open_run("all", [9] * (self.engine.max_context - 1), params, Constraint())
        async with asyncio.timeout(DEADLINE_SECONDS), aclosing(self.engine.sample(run)) as outputs:
            async for _ in outputs:
                pass

    async def _check_that_nothing_is_held(self) -> None:
        await let_the_loop_turn()
        memory = await self.engine.measure_memory()
        if memory.num_used or memory.num_swapped or self.engine.runs:
            gc.collect()  # what is cancelled may leave cycles
            memory = await self.engine.measure_memory()
        assert self.engine.runs == ()
        assert self.engine.kv_tokens == 0
        assert (memory.num_used, memory.num_swapped) == (0, 0)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self._swap_files():  # another thread may remove them
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        self.runner.pool.check()

    # --- Helpers ---

    def _swap_files(self) -> list[Path]:
        paths = Path(self.directory.name).rglob("*")
        return [path for path in paths if path.is_file() and path.name != "lock"]

    def _live(self) -> list[Client]:
        return [c for c in self.clients if c.task is not None and not c.task.done()]

    def _suspended(self) -> list[Client]:
        return [c for c in self._live() if c.waiting is not None and not c.waiting.done()]

    def _settle(self) -> None:
        """Wait until a step is at the gate, or the model has nothing to do."""
        if not self.setting.is_held:
            self.loop.run_until_complete(let_the_loop_turn())
            return
        self.loop.run_until_complete(asyncio.wait_for(self._settled(), DEADLINE_SECONDS))

    async def _settled(self) -> None:
        num_idle = 0
        while num_idle < 3:
            await let_the_loop_turn()
            if any(client.is_at_work for client in self.clients):
                await asyncio.sleep(0.0002)
                continue
            if self.runner.at_gate is not None:
                return
            self.arrived.clear()
            asked = asyncio.ensure_future(self.engine.measure_memory())
            arrived = asyncio.ensure_future(self.arrived.wait())
            try:
                await asyncio.wait([asked, arrived], return_when=asyncio.FIRST_COMPLETED)
            finally:
                asked.cancel()
                arrived.cancel()
            num_idle = 0 if self.arrived.is_set() else num_idle + 1


def _action(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.builds(Action, st.just(name), st.fixed_dictionaries(arguments))


_settings = st.builds(
    Setting,
    num_blocks=st.sampled_from([PLENTY, 60, 20, 12, 8, 6, 4]),
    mode=st.sampled_from(Mode),
    prefill_chunk=st.sampled_from([512, 40, 16, 5]),
    max_rows=st.sampled_from([64, 2, 1]),
    swap_bytes=st.sampled_from([None, None, 40_000, 0]),
    reuse_prefixes=st.booleans(),
    patience=st.sampled_from([0.1, 0.0]),
    gathering=st.sampled_from([0.0, 0.001]),
    is_held=st.sampled_from([True, True, False]),
)
_STEP = _action("step", number=st.sampled_from([1, 2, 5, 20, 60]))
_OPEN = _action(
    "open_run",
    prompt_ids=_prompts,
    params=_params,
    constraint=_constraints,
    salt=st.sampled_from(["a", "b"]),
    reuses=st.booleans(),
    is_slow=st.sampled_from([False, False, False, True]),
    keeps=st.booleans(),
    uses=st.lists(_index, max_size=2),
)
_APPEND = _action("append", index=_index, answer=_answers, settles=st.booleans())
_FOLLOW = _action(
    "follow",
    index=_index,
    num_cut=st.sampled_from([0, 1, 2, 20]),
    params=_params,
    constraint=_constraints,
    keeps=st.booleans(),
)
_SNAPSHOT = st.one_of(
    _action("take_snapshot", index=_index), _action("drop_snapshot", index=_index)
)
_WARM_UP = st.one_of(
    _action(
        "warm_up",
        prompt_ids=_prompts,
        keeps=st.booleans(),
        starts_from_others=st.booleans(),
        is_cancelled=st.sampled_from([False, False, True]),
    ),
    _action("warm_up_again", index=_index, is_cancelled=st.booleans()),
)
_COME_BACK = _action("come_back", index=_index, gets_faster=st.booleans())
_END_EARLY = st.one_of(
    _action("abandon", index=_index),
    _action("cancel", index=_index, settles=st.booleans()),
    _action("wish", index=_index, wish=st.sampled_from([StopReason.CANCELLED, StopReason.STEERED])),
    _action("cancel_warm_up", index=_index),
)
_FAIL = st.one_of(
    _action("arm", failures=st.lists(st.sampled_from(Failure), min_size=1, max_size=2)),
    _action("spoil_swap_files", how=st.sampled_from(["damage", "truncate", "delete"])),
)
# What is there more than once is there more often.
_actions = st.one_of(
    *(3 * [_STEP, _OPEN, _STEP, _APPEND]),
    *(2 * [_FOLLOW]),
    *[_SNAPSHOT, _WARM_UP, _COME_BACK, _END_EARLY, _FAIL],
)
# So many that they meet. What is too much in a failing example is made a step.
_schedules = st.lists(_actions, min_size=25, max_size=80)


@pytest.mark.slow
@pytest.mark.timeout(600)  # to make an example smaller in which something hangs
@pytest.mark.parametrize("kind", RUNNERS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(setting=_settings, actions=_schedules)
def test_whatever_happens_around_a_run_it_says_what_it_says_alone(
    kind: str, setting: Setting, actions: list[Action]
) -> None:
    Machine(kind, setting).play(actions)
