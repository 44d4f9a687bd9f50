"""Whatever happens around a run, it says what it says alone, and nothing stays behind.

A machine plays many clients of one engine, by a schedule that hypothesis draws: runs come, suspend,
go on, are steered and cancelled, in a pool that holds one of them or all; consumers are slow, swap
files get damaged, steps fail. Mostly each step of the model waits until the schedule lets it go, so
that a failing example can be played again and made smaller; where it does not, the threads race.

What runs say depends on all that they have read: the weights are large, and where a text may end
or calls may come, which is often, the model and the seed choose. Each run's tokens are compared to
those of the same run alone in an engine with plenty of memory. The runners are exact, so they must
be equal. What both could have wrong is seen by a model without any of it (``plain_model``).

After each step the books of the memory are compared to what they are kept of: caches, and files.
And what the schedules are for is counted, because a machine in which nothing happens finds nothing.
"""

import asyncio
import gc
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from protocol.items import Message
from protocol.tools import FunctionTool
from sampler.cache_pool import BLOCK_SIZE, BlockPool, blocks_for
from sampler.cpu_decoder import CPUDecoder
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
from sampler.stepper import Stepper
from sampler.suspension import Suspension
from sampler.suspension_policy import Mode
from sampler.token_channel import Told
from sampler.torch_decoder import TorchDecoder
from tests.sampler.cpu_decoders import covered_model, new_decoder, new_storage
from tests.sampler.decoders import known_weights
from tests.sampler.families import FAMILIES, family
from tests.sampler.plain_model import PlainModel
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

DEADLINE_SECONDS = 30.0
GRACE_SECONDS = 5.0
SOON = 60
"""Steps."""
PLENTY = 512
"""Blocks."""
MAX_CONTEXT = 256

# --- Models ---------------------------------------------------------------------------------------


@cache
def _loaded() -> LoadedModel:
    return steered_model(MAX_CONTEXT)


_OPTIONS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT}


def _family(name: str) -> PreTrainedModel:
    # In float64 a prompt gives the same whether it is read in one piece or in several, but for what
    # is far too small to tip the scales.
    return family(name, {**FAMILIES[name], **_OPTIONS}).double()


_served_family = cache(_family)


def _covered() -> PreTrainedModel:
    return covered_model(**_OPTIONS)


@cache
def _weights() -> DecoderWeights:
    return known_weights(_covered())


def _generic(name: str, num_blocks: int) -> ModelRunner:
    return GenericRunner(_served_family(name), pool=BlockPool(num_blocks), is_exact=True)


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

PLAIN: dict[str, Callable[[], PreTrainedModel]] = {
    "generic": partial(_family, "Llama"),
    "generic, window": partial(_family, "Mistral"),
    "generic, convolutions": partial(_family, "Lfm2"),
    "torch": _covered,
    "compiled, float32": _covered,
}
"""The models of the runners, once more. (One whose weights are rounded is none of the library.)"""


@cache
def plain_model(kind: str) -> PlainModel:
    return PlainModel(PLAIN[kind](), _steer)


_END_OF_THOUGHTS = "</think>"
_PERIOD = 24


@cache
def _choices() -> dict[int, Sequence[int]]:
    """Return among which tokens the weights choose, by position in a cycle; letters elsewhere.

    A turn can make a call, or end, soon after wherever it begins, and mostly does.
    """
    encode = _loaded().tokenizer.encode_text
    letters = encode("efghijklmnopqrstuvwxyz")
    spelled = {i: encode(c) for i, c in enumerate(_END_OF_THOUGHTS)}
    return {
        **dict.fromkeys(range(_PERIOD), letters),
        **spelled,
        11: [CALL_OSLO, CALL_ROME, letters[0]],
        12: [AND_CALL_ROME, IM_END],
        13: [IM_END, letters[1]],
        20: [CALL_OSLO, CALL_ROME],
        21: [AND_CALL_ROME, IM_END],
        22: [IM_END],
    }


def _steer(logits: Tensor, position: int) -> Tensor:
    """Return the ``logits`` of the token at ``position`` with what it is steered to in front."""
    choice = list(_choices()[position % _PERIOD])
    # Not so little that what a grammar would rather have is all the same.
    steered = logits - 1000
    steered[choice] = logits[choice]
    return steered


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
        self.caches: WeakSet[KVCache] = WeakSet()
        """All that are not given up within a step."""
        self.idle: Sequence[KVCache] = ()
        """Caches that nobody works on in this step, whatever comes of it."""
        self.tally: Counter[str] = Counter()
        self.on_arrival: Callable[[], object] = lambda: None
        self._failed_with: Failure | None = None  # the step, before it was taken again
        self._gate = threading.Condition()

    def new_cache(self) -> KVCache:
        new = super().new_cache()
        self.caches.add(new)
        return new

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

    def look(self, told: Told | None) -> None:
        """Find out whether all is well after a step, of which there is so much to tell."""
        if self.mistakes:
            return
        try:
            for channel, _ in told or ():
                assert 0 <= channel.num_sent - channel.num_taken <= channel.window
            eventually(self._check_books)
            if self._failed_with is not None and isinstance(self._failed_with.error, MemoryError):
                assert not any(cache.num_blocks for cache in self.idle), "all that can go went"
            self._failed_with = None
        except AssertionError as error:
            self.mistakes.append(error)

    def _check_books(self) -> None:
        """Each reference to a block is that of a cache that is there, and the other way round."""
        self.pool.check()
        caches = list(self.caches)
        held = Counter(block for cache in caches for block in cache.table.blocks)
        assert held == self.pool.holders()
        published = self.pool.published()
        free = self.pool.num_blocks - len(held | dict.fromkeys(published, 1))
        assert self.pool.num_free == free + self.pool.num_cached
        assert self.pool.num_used == len(held)

    def _fail(self, pieces: Sequence[Piece], failure: Failure) -> None:
        self.tally["failures beside neighbours"] += len(pieces) > 1
        match failure:
            case Failure.AFTER | Failure.OUT_OF_MEMORY_AFTER:
                self._forward(pieces)
            case Failure.HALF_WAY if len(pieces) > 1:
                self._forward(pieces[: len(pieces) // 2])
            case Failure.BROKEN:
                pieces[0].cache.is_broken = True
            case _:
                pass
        self._failed_with = self._failed_with or failure
        raise failure.error

    def _forward(self, pieces: Sequence[Piece]) -> list[Tensor | None]:
        starts = [piece.cache.num_tokens for piece in pieces]
        self._count(pieces)
        logits = self._runner.forward(pieces)
        self.num_forwarded += sum(len(piece.token_ids) for piece in pieces)
        self._note_mistakes(pieces, starts)
        return [_steered(one, piece.cache) for one, piece in zip(logits, pieces, strict=True)]

    def _count(self, pieces: Sequence[Piece]) -> None:
        self.tally["steps"] += 1
        self.tally["steps of several runs"] += len(pieces) > 1
        published = self.pool.published()
        for table in (piece.cache.table for piece in pieces):
            tail, num_filled = divmod(table.num_tokens, BLOCK_SIZE)
            if num_filled:
                self.tally["copies on write"] += self.pool.is_shared(table.blocks[tail])
                self.tally["published blocks written to"] += table.blocks[tail] in published

    def _note_mistakes(self, pieces: Sequence[Piece], starts: Sequence[int] = ()) -> None:
        """Note what is wrong with ``pieces``, which were forwarded from ``starts`` on, if they
        were."""
        try:
            assert len({id(piece.cache) for piece in pieces}) == len(pieces), "one step each"
            for piece in pieces:
                assert not piece.cache.is_broken
                assert not piece.cache.is_swapped
                assert piece.token_ids
            published = self.pool.published()
            for piece, start in zip(pieces, starts, strict=False):
                table = piece.cache.table
                for block in table.blocks[start // BLOCK_SIZE : blocks_for(table.num_tokens)]:
                    assert not self.pool.is_shared(block), "what others hold is not written to"
                    assert block not in published, "what others can find is not written to"
        except AssertionError as error:
            self.mistakes.append(error)


def _steered(logits: object, cache: KVCache) -> Tensor | None:
    assert not isinstance(logits, Certain)
    return _steer(logits, cache.num_tokens) if isinstance(logits, Tensor) else None


class WatchedStepper(Stepper):
    """One that is looked into after each step."""

    def __init__(self, look: Callable[[Told | None], object], *args: Any) -> None:
        super().__init__(*args)
        self._look = look

    def step(self, *, may_warm_up: bool) -> Told | None:
        told = super().step(may_warm_up=may_warm_up)
        self._look(told)
        return told


def eventually(check: Callable[[], object]) -> None:
    """Make sure that ``check`` passes soon: what another thread is letting go of, or has left to
    the garbage collector, is gone in a moment."""
    began_at = time.monotonic()
    while (seconds := time.monotonic() - began_at) < GRACE_SECONDS:
        with suppress(AssertionError):
            check()
            return
        time.sleep(0.001)
        if seconds > GRACE_SECONDS / 50:
            gc.collect()  # takes long
    check()


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
    num_suspensions: int = 0
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
        held_cache = self.engine.snapshot(self.run).cache
        if output.suspension is not None or held_cache.can_truncate:
            held = held_cache.num_tokens
            assert held in (len(self.run.tokens) - 1, 0), "the last token is pending"
        if self.keeps is not None:
            self.keeps.append(self.engine.snapshot(self.run))

    async def _answer(self, suspension: Suspension) -> Resumption | None:
        assert suspension.num_tokens == len(self.run.tokens)
        self.suspension = suspension
        self.num_suspensions += 1
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

    def is_free(self, segment: int) -> bool:
        """Tell whether no grammar bound a segment."""
        constraints = [self.wanted.constraint, *(answer.constraint for answer in self.answers)]
        return constraints[segment] == "free"

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


@pytest.fixture(scope="module", params=RUNNERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Give the name of a runner that is ready: to compile kernels takes longer than the machine
    waits for a step."""
    name: str = request.param
    runner = RUNNERS[name](4)
    if isinstance(runner, CPUDecoder):
        runner.warm_up()
    return name


@pytest.fixture(scope="module", autouse=True)
def close_all() -> Iterator[None]:
    yield
    for one in _ALONE.values():
        one.close()
    _ALONE.clear()


def new_engine(runner: HeldRunner, **options: Any) -> LocalEngine:
    model = _loaded()
    model.tokenizer.counters = runner.counters
    # A window that turns of some length use up.
    return LocalEngine(replace(model, runner=runner), window=8, **options)


# --- The machine ----------------------------------------------------------------------------------

_SHARED_IDS = tuple(
    torch.randint(3, 259, (96,), generator=torch.Generator().manual_seed(4)).tolist()
)

_prompts = st.builds(
    lambda num_shared, own: (*_SHARED_IDS[:num_shared], *own),
    st.sampled_from([0, 1, 15, 16, 17, 32, 33, 48]),
    st.sampled_from([(5,), (70, 5), (70, 200, 5)]),
)
_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.0]),
    seed=st.integers(0, 1),
    top_p=st.sampled_from([1.0, 1.0, 1.0, 0.9]),
    max_output_tokens=st.sampled_from([None, None, None, None, None, 40, 17, 1]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
)
_constraints = st.sampled_from([*(6 * ["auto"]), "free", "free", "thinking", "forced"])
_answers = st.builds(
    Answer,
    output=st.sampled_from(["", "sunny", "rain, and wind"]),
    message=st.sampled_from([None, None, None, "And?"]),
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
        self.files_were_deleted = False
        self.hit_a_warm_up = False
        self.tally: Counter[str] = Counter()
        """How often happened what the schedules are for."""
        self.mistakes = _Mistakes()
        logger = logging.getLogger("sampler")
        logger.addHandler(self.mistakes)
        # What is logged here is no news, and records that are kept keep what failed.
        logger.propagate = False
        self.runner = HeldRunner(RUNNERS[kind](setting.num_blocks))
        self.runner.is_held = setting.is_held
        self.arrived = asyncio.Event()
        self.runner.on_arrival = self._note_arrival
        with (
            mock.patch("sampler.local_engine.PATIENCE_SECONDS", setting.patience),
            mock.patch("sampler.local_engine.Stepper", partial(WatchedStepper, self.runner.look)),
        ):
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
        self,
        index: int,
        num_cut: int,
        params: SamplingParams,
        constraint: str,
        keeps: bool,
        is_last: bool,
    ) -> None:
        """Open a run that goes on from a snapshot, which nobody else can do if it is the last."""
        self._step_until(lambda: self.snapshots)
        if not self.snapshots:
            return
        snapshot = self.snapshots[index % len(self.snapshots)]
        if is_last:
            self.snapshots.remove(snapshot)
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
            self.runner.idle = [self.engine.snapshot(c.run).cache for c in self._suspended()]
            self.runner.let_go()
            self._settle()
            self.runner.idle = ()

    def _step_until(self, condition: Callable[[], object]) -> None:
        """Let the model take steps until something is so, if that comes soon."""
        for _ in range(SOON):
            if condition():
                return
            self.step(1)

    def append(self, index: int, answer: Answer, settles: bool) -> None:
        self._step_until(self._suspended)
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
        salt: str,
        is_cancelled: bool,
    ) -> None:
        if len(prompt_ids) >= self.engine.max_context:
            return
        snapshot = self.engine.new_snapshot(prompt_ids)
        sources = Sources(tuple(self.snapshots) if starts_from_others else (), salt)
        if keeps:
            self.snapshots.append(snapshot)
            self.warmed_up.append(snapshot)
        self._begin_to_warm_up(snapshot, sources, is_cancelled=is_cancelled)

    def warm_up_again(self, index: int, is_cancelled: bool) -> None:
        """Go on with one that may have been cancelled."""
        if not self.warmed_up or not all(warm_up.done() for warm_up in self.warm_ups):
            return
        snapshot = self.warmed_up[index % len(self.warmed_up)]
        self._begin_to_warm_up(snapshot, Sources(), is_cancelled=is_cancelled)

    def _begin_to_warm_up(
        self, snapshot: Snapshot, sources: Sources, *, is_cancelled: bool
    ) -> None:
        warm_up = self.loop.create_task(self._warm_up(snapshot, sources))
        self.warm_ups.append(warm_up)
        self.num_warm_ups += 1
        if is_cancelled:
            self.loop.run_until_complete(let_the_loop_turn())
            warm_up.cancel()
        self._settle()

    async def _warm_up(self, snapshot: Snapshot, sources: Sources) -> None:
        try:
            await self.engine.warm_up(snapshot, sources)
        except EngineError as error:
            if not self.hit_a_warm_up:
                self.complaints.append(f"a warm-up failed: {error} {error.__cause__!r}")

    def cancel_warm_up(self, index: int) -> None:
        if not self.warm_ups:
            return
        self.warm_ups[index % len(self.warm_ups)].cancel()
        self._settle()

    # --- What goes wrong ---

    def arm(self, failures: list[Failure], hits_several: bool) -> None:
        """Let the next steps fail, or the next ones from a step of several runs on."""
        if not self.setting.is_held:
            return
        if hits_several:
            for prompt_ids in ((70,), (5, 70)):
                wanted = Wanted(prompt_ids, SamplingParams(), "auto")
                self._open(wanted, Sources(salt="a"), is_slow=False, keeps=True)
            self._step_until(lambda: len(self.runner.at_gate or ()) > 1)
        self.failures_were_armed = True
        self.runner.failures.extend(failures)

    def spoil_swap_files(self, how: str) -> None:
        if not self.setting.is_held:
            return  # files come and go meanwhile
        self.failures_were_armed = True
        for path in self._swap_files():
            with suppress(FileNotFoundError):  # it was to be removed, and now is
                self._spoil(path, how)

    def _spoil(self, path: Path, how: str) -> None:
        if how == "delete":
            path.unlink()
            self.files_were_deleted = True
            return
        # Not a new one in the place of what is being removed.
        with path.open("r+b") as file:
            half = path.stat().st_size // 2
            file.seek(half)
            if how == "damage":
                rest = file.read()
                file.seek(half)
                file.write(bytes(byte ^ 0x40 for byte in rest))
            else:
                file.truncate()

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
        if self.setting.is_held and self.runner.at_gate is None:
            eventually(self._check_that_all_is_held_by_somebody)

    def _check_that_all_is_held_by_somebody(self) -> None:
        """Where the model has nothing to do: each cache is that of a run, or of a snapshot, and
        each file that of a cache."""
        self._settle()
        if self.runner.at_gate is not None:
            return
        caches = list(self.runner.caches)
        known = {snapshot.cache for snapshot in self.snapshots}
        known |= {cache for client in self._live() if (cache := self._cache_of(client))}
        # What a warm-up fills, or an error that is kept has in its traceback, is not known here.
        ended_early = [client for client in self.clients if client.was_cancelled or client.error]
        assert len(set(caches) - known) <= len(self.warm_ups) + len(ended_early)
        num_swapped = sum(cache.is_swapped for cache in caches)
        num_files = len(self._swap_files())
        assert num_files == num_swapped or (self.files_were_deleted and num_files < num_swapped)

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
        self._check_plainly()
        self._count()
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
                            enough = len(client.answers) > 0
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
        assert counters.tokens_reforwarded >= sum(run.tokens_reforwarded for run in runs)
        if self.num_warm_ups:
            return
        assert counters.tokens_reforwarded == sum(run.tokens_reforwarded for run in runs)
        if self.failures_were_armed:
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

    def _check_plainly(self) -> None:
        """Where it can be told without our own code what comes next, that came."""
        for client in self.clients:
            run = client.run
            if self.kind in PLAIN and run.num_forwarded and run.params.top_p == 1:
                num_checked = plain_model(self.kind).check(run, client.is_free)
                self.tally["tokens checked plainly"] += num_checked

    def _count(self) -> None:
        counters, runs = self.engine.counters, [client.run for client in self.clients]
        self.tally += self.runner.tally
        self.tally += Counter(
            {
                "runs": len(runs),
                "suspensions": sum(client.num_suspensions for client in self.clients),
                "resumptions": sum(len(run.segments) - 1 for run in runs),
                "runs that start from others": sum(run.num_inherited > 0 for run in runs),
                "runs forwarded again": sum(run.tokens_reforwarded > 0 for run in runs),
                "swaps out": counters.swaps_out,
                "swaps in": counters.swaps_in,
                "discards": counters.discards,
                "discards of what was kept": counters.kept_discards,
                "preemptions": counters.preemptions,
                "cancelled or steered": sum(client.was_cancelled for client in self.clients),
            }
        )

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
        return [path for path in paths if path.is_file() and path.suffix != ".lock"]

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
    num_blocks=st.sampled_from([24, 16, 20, 12, 32, 10, 60, 8, PLENTY]),
    mode=st.sampled_from([Mode.SWAP, *Mode]),
    prefill_chunk=st.sampled_from([512, 64, 40, 17]),
    max_rows=st.sampled_from([64, 64, 64, 2, 1]),
    swap_bytes=st.sampled_from([None, None, None, None, 40_000, 0]),
    reuse_prefixes=st.booleans(),
    patience=st.sampled_from([0.1, 0.0]),
    gathering=st.sampled_from([0.0, 0.01, 0.01]),
    is_held=st.sampled_from([True, True, True, True, False]),
)
_STEP = _action("step", number=st.sampled_from([1, 2, 5, 12, 20]))
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
    num_cut=st.sampled_from([20, 0, 1, 5, 20]),
    params=_params,
    constraint=_constraints,
    keeps=st.booleans(),
    is_last=st.sampled_from([True, True, False]),
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
        salt=st.sampled_from(["a", "b"]),
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
_ARM = _action(
    "arm",
    failures=st.lists(st.sampled_from(Failure), min_size=1, max_size=2),
    hits_several=st.sampled_from([True, True, False]),
)
_SPOIL = _action("spoil_swap_files", how=st.sampled_from(["damage", "truncate", "delete"]))
# What is there more than once is there more often.
_actions = st.one_of(
    *(6 * [_STEP, _APPEND]),
    *(3 * [_OPEN, _FOLLOW, _ARM]),
    *[_SNAPSHOT, _WARM_UP, _COME_BACK, _END_EARLY, _SPOIL],
)
# So many that they meet. What is too much in a failing example is made a step.
_schedules = st.builds(
    list.__add__,
    st.lists(_OPEN, min_size=3, max_size=5),
    st.lists(_actions, min_size=20, max_size=40),
)

EXPECTED = {
    "suspensions": 15,
    "resumptions": 12,
    "swaps out": 3,
    "swaps in": 3,
    "discards": 3,
    "discards of what was kept": 1,
    "preemptions": 1,
    "runs forwarded again": 3,
    "cancelled or steered": 5,
    "steps of several runs": 60,
    "failures beside neighbours": 2,
}
"""How often the known schedules have happen, at least, what they are for."""
EXPECTED_OF_BLOCKS = {"runs that start from others": 2, "copies on write": 1}
"""Where caches can be shared anywhere."""

_always = settings(deadline=None, suppress_health_check=list(HealthCheck))
_random = settings(_always, max_examples=3)
_known = settings(_always, max_examples=12, database=None)
slow = pytest.mark.slow
may_be_made_smaller = pytest.mark.timeout(600)  # an example in which something hangs


@slow
@may_be_made_smaller
@_random
@given(setting=_settings, actions=_schedules)
def test_whatever_happens_around_a_run_it_says_what_it_says_alone(
    kind: str, setting: Setting, actions: list[Action]
) -> None:
    Machine(kind, setting).play(actions)


@slow
@may_be_made_smaller
def test_so_it_does_where_all_happens_that_can(kind: str) -> None:
    """The same schedules every time, in which enough happens for mistakes to show."""
    tally: Counter[str] = Counter()

    @_known
    @seed(5)
    @given(setting=_settings, actions=_schedules)
    def play(setting: Setting, actions: list[Action]) -> None:
        machine = Machine(kind, setting)
        machine.play(actions)
        tally.update(machine.tally)

    play()

    expected = EXPECTED if kind.startswith("generic") else EXPECTED | EXPECTED_OF_BLOCKS
    assert {name: tally[name] for name, least in expected.items() if tally[name] < least} == {}
