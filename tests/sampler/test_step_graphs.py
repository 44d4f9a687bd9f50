"""Graphs give what steps give without them. Recorded operations stand in for those of CUDA."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch import Tensor

from sampler.cache_pool import BLOCK_SIZE, BlockPool
from sampler.kv_cache import KVShape, PagedCache, PagedStorage
from sampler.model_runner import Piece
from sampler.step_graphs import Capture, CUDACapture, DecodingRow, StepGraphs
from sampler.swap import SwapStore
from sampler.torch_decoder import TorchDecoder
from tests.sampler.decoders import decoder_model, known_weights
from tests.sampler.families import IDS, TOLERANCE, distance
from tests.sampler.recorded_operations import record

VOCAB = 32
WEIGHTS = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(1))


def row(token_id: int, *blocks: int) -> DecodingRow:
    """Return a row at the end of ``blocks``, which are those of its sequence."""
    return DecodingRow(token_id, len(blocks) * BLOCK_SIZE - 1, blocks or (7,))


def rows(*lengths: int) -> list[DecodingRow]:
    """Return rows of so many blocks each, with different tokens."""
    return [row(index % VOCAB, *range(length)) for index, length in enumerate(lengths)]


def computed(table: Tensor) -> Tensor:
    """Return logits to which token, position and each block make a difference."""
    token_ids, positions, blocks = table[:, 0], table[:, 1], table[:, 2:]
    seen = blocks * (torch.arange(blocks.shape[1]) <= positions[:, None] // BLOCK_SIZE)
    return WEIGHTS[token_ids] + 0.1 * positions[:, None] + 0.01 * seen.sum(dim=1, keepdim=True)


def expected(of: Sequence[DecodingRow]) -> Tensor:
    return torch.cat([computed(torch.tensor([[r.token_id, r.position, *r.blocks]])) for r in of])


class Recorder:
    """Records, and counts what it is asked for."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.fault: Exception | None = None
        """What it fails with, from now on."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.fault is not None:
            raise self.fault
        self.num_recorded += 1
        replay = record(function)

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return counted


class Steps:
    """Takes steps by graphs, and knows which were taken without them."""

    def __init__(
        self,
        compute: Callable[[Tensor], Tensor] = computed,
        *,
        capture: Capture | None = None,
        block_bytes: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.recorder = Recorder()
        self.graphs = StepGraphs(
            compute,
            capture or self.recorder,
            block_bytes=block_bytes,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.num_ordinary = 0

    def take(self, of: Sequence[DecodingRow]) -> Tensor:
        def ordinary() -> Tensor:
            self.num_ordinary += 1
            return expected(of)

        return self.graphs.logits(of, ordinary)


# --- Buckets -------------------------------------------------------------------------------------


def test_the_first_step_of_a_size_is_computed_the_ordinary_way_and_later_ones_are_not() -> None:
    steps = Steps()

    for index in range(4):
        of = [row(index, 5), row(index + 1, *range(index + 1))]
        torch.testing.assert_close(steps.take(of), expected(of))

    assert (steps.num_ordinary, steps.recorder.num_recorded) == (1, 1)
    assert steps.recorder.num_replayed == 4


@pytest.mark.parametrize(
    ("of", "then", "is_the_same"),
    [
        ((1,), (16,), True),
        ((1,), (17,), False),
        ((17,), (32,), True),
        ((33,), (64,), True),
        ((1,), (1, 1), False),
        ((1, 1, 1), (1, 1, 1, 16), True),
        ((1,) * 33, (1,) * 64, True),
        ((1,) * 32, (1,) * 33, False),
    ],
)
def test_steps_of_like_sizes_have_a_graph_in_common(
    of: tuple[int, ...], then: tuple[int, ...], is_the_same: bool
) -> None:
    steps = Steps()

    steps.take(rows(*of))
    logits = steps.take(rows(*then))

    torch.testing.assert_close(logits, expected(rows(*then)))
    assert steps.recorder.num_recorded == (1 if is_the_same else 2)


def test_what_is_missing_writes_what_is_there() -> None:
    tables = []

    def kept(table: Tensor) -> Tensor:
        tables.append(table)
        return computed(table)

    steps = Steps(kept)
    steps.take([row(3, 8, 9), row(4, 6, 5, 2), row(5, 7)])

    [table] = tables
    assert table.shape == (4, 2 + 16)
    assert table[0].tolist() == [3, 31, 8, 9, *[8] * 14]
    assert table[2].tolist() == table[3].tolist() == [5, 15, *[7] * 16]


@pytest.mark.parametrize(
    ("lengths", "block_bytes"),
    [
        ([1] * 65, 1),
        # More than 128 MiB are read, or more than 32 MiB for nothing.
        ([64], 2 << 20 | 1),
        ([33], (32 << 20) // 31 + 1),
        ([200, *[1] * 7], 18_300),
    ],
    ids=["rows", "read", "blocks missing", "rows of unlike length"],
)
def test_steps_that_have_nothing_to_win_get_no_graph(lengths: list[int], block_bytes: int) -> None:
    large, small = Steps(block_bytes=block_bytes), Steps(block_bytes=1)

    logits = large.take(rows(*lengths))
    small.take(rows(*lengths[:64]))

    assert logits.equal(expected(rows(*lengths)))
    assert (large.num_ordinary, large.recorder.num_recorded) == (1, 0)
    assert small.recorder.num_recorded == 1


def test_there_is_an_end_to_graphs_and_those_that_are_there_stay() -> None:
    steps = Steps()
    sizes = [(1 << height, 16 << width) for width in range(7) for height in range(7)]

    for num_rows, width in sizes:
        steps.take(rows(*[width] * num_rows))
    steps.take(rows(16))

    assert len(sizes) == 49
    assert steps.recorder.num_recorded == 48
    assert steps.num_ordinary == 49
    assert steps.recorder.num_replayed == 49


# --- What callers have ---------------------------------------------------------------------------


def test_logits_stay_what_they_are_when_the_next_step_is_taken() -> None:
    steps = Steps()
    steps.take(rows(1, 1))

    held = steps.take([row(3, 1), row(4, 2)])
    steps.take([row(5, 3), row(6, 4)])

    torch.testing.assert_close(held, expected([row(3, 1), row(4, 2)]))


def test_a_step_that_fails_without_a_graph_fails_and_takes_none_away() -> None:
    steps = Steps()

    with pytest.raises(IndexError):
        steps.take([row(VOCAB, 1)])
    assert steps.recorder.num_recorded == 0

    steps.take(rows(1))
    steps.take(rows(1))
    assert steps.num_ordinary == 2
    with pytest.raises(IndexError):
        steps.take([row(VOCAB, 1)])
    steps.take(rows(1))
    assert steps.num_ordinary == 2


# --- Trust ---------------------------------------------------------------------------------------


def check_it_does_without(steps: Steps, caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Make sure that a new size leads to a warning, and to no graph in any step from then on."""
    before = steps.recorder.num_replayed
    new = rows(17)

    first, again, old = steps.take(new), steps.take(new), steps.take(rows(1))

    assert first.equal(again)
    assert first.equal(expected(new))
    assert old.equal(expected(rows(1)))
    [warning] = caplog.records
    assert what in warning.getMessage()
    # One whose check fails is replayed once.
    assert steps.recorder.num_replayed - before <= 1


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        torch.OutOfMemoryError("CUDA out of memory"),
        AssertionError("anything"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_where_recording_fails_there_are_no_graphs_any_more(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    steps.take(rows(1))
    steps.take(rows(1))
    assert steps.num_ordinary == 1

    steps.recorder.fault = fault
    check_it_does_without(steps, caplog, f"{type(fault).__name__}: {fault}")
    assert steps.num_ordinary == 5, "and the step itself is computed again"


def test_graphs_that_are_not_used_any_more_are_not_kept() -> None:
    recorded: list[ref[Callable[[], None]]] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        if len(recorded) == 2:
            raise torch.OutOfMemoryError
        replay = record(function)
        recorded.append(ref(kept := lambda: replay()))  # a method cannot be watched
        return kept

    steps = Steps(capture=capture)
    for lengths in ((1,), (1, 1), (17,)):
        assert all(replay() for replay in recorded)
        steps.take(rows(*lengths))

    assert [replay() for replay in recorded] == [None, None]


def test_a_graph_that_does_nothing_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    check_it_does_without(Steps(capture=lambda function: lambda: None), caplog, "its logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_does_not_read_its_memory_is_not_trusted(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    def frozen(table: Tensor) -> Tensor:
        # As if the tokens had been known when it was recorded.
        return computed(torch.tensor(table.tolist()))

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()
        return lambda: None

    steps = Steps(frozen, capture=capture, dtype=dtype)
    check_it_does_without(steps, caplog, "its logits differ by")


@pytest.mark.parametrize(
    ("dtype", "error", "is_trusted"),
    [
        (torch.float32, 1e-4, True),
        (torch.float32, 1e-2, False),
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 0.3, False),
    ],
)
def test_rounding_is_no_fault(
    dtype: torch.dtype, error: float, is_trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(lambda table: computed(table) * (1 + error), dtype=dtype)

    logits = steps.take(rows(1))

    assert logits.equal(expected(rows(1)))
    assert len(caplog.records) == (not is_trusted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_everywhere", [False, True])
def test_what_is_no_number_without_a_graph_need_not_be_one_with_it(
    value: float, is_everywhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(table: Tensor) -> Tensor:
        return computed(table).index_fill(1, torch.tensor([5]), value)

    def all_broken(table: Tensor) -> Tensor:
        return computed(table) * value

    compute = all_broken if is_everywhere else broken
    of = rows(1)
    tables = torch.tensor([[r.token_id, r.position, *r.blocks] for r in of])
    graphs = Steps(compute).graphs

    graphs.logits(of, lambda: compute(tables))
    assert not caplog.records

    Steps(compute).take(of)
    assert len(caplog.records) == 1, "a number without a graph"


# --- CUDA ----------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self) -> None:
        self.waits_for: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits_for.append(other)


class NoCUDA:
    """The part of ``torch.cuda`` that records, in the place of which it is put; it does nothing.

    It fails as that does: a recording that breaks off does not leave its stream.
    """

    def __init__(self) -> None:
        self.default = self.current = FakeStream()
        self.recorded_on: list[FakeStream | None] = []
        """What each call of the function was made on, and None where it was being recorded."""
        self.settings: dict[str, Any] = {}
        self._is_recording = False

    def function(self) -> None:
        self.recorded_on.append(None if self._is_recording else self.current)

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream()

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: "replayed")

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, **settings: Any) -> Iterator[None]:
        before, self.current = self.current, settings["stream"]
        self.settings = settings
        self._is_recording = True
        yield
        self._is_recording = False
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> NoCUDA:
    cuda = NoCUDA()
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def test_cuda_records_on_a_stream_of_its_own_what_has_run_there_before(cuda: NoCUDA) -> None:
    capture = CUDACapture(torch.device("cuda"))

    replay = capture(cuda.function)

    *before, recording = cuda.recorded_on
    side = cuda.settings["stream"]
    assert before == [side, side]
    assert side is not cuda.default
    assert recording is None
    assert cuda.settings["capture_error_mode"] == "thread_local"
    assert cuda.settings["pool"] == "pool"
    assert side.waits_for == [cuda.default]
    assert cuda.default.waits_for == [side]
    assert replay() == "replayed"

    capture(cuda.function)
    assert cuda.settings["stream"] is side, "so that the graphs share their memory"


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_where_cuda_fails_to_record_the_caller_is_where_it_was(
    cuda: NoCUDA, num_calls: int
) -> None:
    def function() -> None:
        cuda.function()
        if len(cuda.recorded_on) > num_calls:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        CUDACapture(torch.device("cuda"))(function)

    assert cuda.current is cuda.default
    assert len(cuda.default.waits_for) == 1


# --- The decoder ---------------------------------------------------------------------------------


class Both(NamedTuple):
    """A decoder with graphs and one without, and the caches of the same sequences in both."""

    runners: tuple[TorchDecoder, TorchDecoder]
    recorder: Recorder

    def step(self, pieces: Sequence[tuple[Sequence[int], "Pair"]]) -> list[int]:
        """Forward ``pieces`` in both; return the likeliest tokens, which have to be the same."""
        with_graphs, without = (
            runner.forward([Piece(ids, pair[side]) for ids, pair in pieces])
            for side, runner in enumerate(self.runners)
        )
        for one, other in zip(with_graphs, without, strict=True):
            assert one is not None
            assert other is not None
            assert distance(one, other) < TOLERANCE
            assert one.argmax() == other.argmax()
        return [int(one.argmax()) for one in with_graphs if one is not None]

    def new(self) -> "Pair":
        one, other = (runner.new_cache() for runner in self.runners)
        return one, other


Pair = tuple[PagedCache, PagedCache]


def both(name: str = "Llama", num_blocks: int = 300) -> Both:
    recorder = Recorder()
    with_graphs, without = (runner(name, num_blocks, capture) for capture in (recorder, None))
    return Both((with_graphs, without), recorder)


def runner(
    name: str, num_blocks: int, capture: Capture | None, *, is_exact: bool = False
) -> TorchDecoder:
    weights = known_weights(decoder_model(name))
    shape = weights.shape
    kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    storage = PagedStorage(BlockPool(num_blocks), kv_shape, weights.dtype)
    storage.tensor.fill_(torch.nan)
    return TorchDecoder(weights, storage, is_exact=is_exact, capture=capture)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[SwapStore, SwapStore]]:
    stores = SwapStore(tmp_path / "one"), SwapStore(tmp_path / "other")
    yield stores
    for store in stores:
        store.close()


def test_a_sequence_grows_through_all_widths() -> None:
    it = both("Qwen 3")
    pair = it.new()
    token_ids = (IDS * 7)[:250]
    [token] = it.step([(token_ids, pair)])

    for _ in range(14):
        [token] = it.step([([token], pair)])
    it.step([(token_ids, pair)])
    for _ in range(20):
        [token] = it.step([([token], pair)])

    assert pair[0].num_tokens == 534, "from 16 blocks to 33"
    assert it.recorder.num_recorded == 3
    assert it.recorder.num_replayed == 34


def test_blocks_that_are_begun_are_clean() -> None:
    it = both(num_blocks=4)
    pair = it.new()
    [token] = it.step([(IDS[:15], pair)])

    for _ in range(20):  # the pool's memory was NaN
        [token] = it.step([([token], pair)])
    assert it.recorder.num_replayed == 20


def test_pieces_that_do_not_decode_make_an_ordinary_step() -> None:
    it = both()
    one, other = it.new(), it.new()
    it.step([(IDS[:5], one), ([6], other)])
    for side, runner in enumerate(it.runners):
        runner.forward([Piece([7], other[side], wants_logits=False)])

    assert it.recorder.num_recorded == 0
    it.step([([8], one), ([9], other)])
    assert it.recorder.num_recorded == 1


def test_a_step_that_fails_in_a_graph_leaves_caches_as_they_were() -> None:
    it = both()
    pair = it.new()
    it.step([(IDS[:20], pair)])
    it.step([([4], pair)])

    with pytest.raises(IndexError):
        it.runners[0].forward([Piece([10_000], pair[0])])

    assert pair[0].num_tokens == 21
    assert not pair[0].is_broken
    it.step([([5], pair)])
    assert (it.recorder.num_recorded, it.recorder.num_replayed) == (1, 3)


def test_where_recording_fails_decoding_goes_on() -> None:
    it = both()
    one, other = it.new(), it.new()
    [token] = it.step([(IDS[:20], one)])
    it.step([(IDS[:9], other)])
    for _ in range(3):
        [token] = it.step([([token], one)])

    it.recorder.fault = torch.OutOfMemoryError("CUDA out of memory")
    it.step([([token], one), ([5], other)])
    it.step([([6], one), ([7], other)])
    it.step([([8], one)])

    assert it.recorder.num_replayed == 3


def test_what_a_graph_wrote_that_is_not_trusted_is_written_again() -> None:
    def recorded_only(function: Callable[[], None]) -> Callable[[], None]:
        function()  # on other tokens
        return lambda: None

    distrusting, ordinary = runner("Llama", 10, recorded_only), runner("Llama", 10, None)
    caches = distrusting.new_cache(), ordinary.new_cache()

    for token_ids in (IDS[:20], [4], [5]):
        [one] = distrusting.forward([Piece(token_ids, caches[0])])
        [other] = ordinary.forward([Piece(token_ids, caches[1])])
        assert one is not None
        assert other is not None
        assert one.equal(other)


def test_the_exact_mode_has_no_graphs() -> None:
    with pytest.raises(AssertionError, match="a graph has all rows in one product"):
        runner("Llama", 10, record, is_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_caches_tokens_are_the_same(
    seed: int, stores: tuple[SwapStore, SwapStore]
) -> None:
    it = both(["Llama", "SmolLM", "Qwen 2", "Qwen 3", "Mistral", "Llama, tied"][seed])
    schedule = Schedule(it, stores, random.Random(seed))

    for _ in range(150):
        schedule.go_on()

    assert it.recorder.num_recorded > 4
    assert it.recorder.num_replayed > 50
    for runner in it.runners:
        runner.new_cache().table.pool.check()


class Schedule:
    """Sequences that come and go, and what happens to their caches meanwhile."""

    def __init__(self, it: Both, stores: tuple[SwapStore, SwapStore], rng: random.Random) -> None:
        self._it = it
        self._stores = stores
        self._rng = rng
        self._held: list[tuple[list[int], Pair]] = []
        """What each holds, with the token that comes next, and its caches."""

    def go_on(self) -> None:
        """Let one thing happen, and take a step."""
        happening = self._rng.choice(
            [self._join, self._join, self._share, self._fork, self._truncate, self._swap, self._go]
        )
        if happening == self._join or self._held:
            happening()
        while len(self._held) > 9:
            self._go()
        self._decode()

    def _join(self) -> None:
        """Read a prompt, beside those that decode."""
        length = self._rng.choice([1, 7, 16, 33, 250])
        token_ids = [self._rng.randrange(3, 64) for _ in range(length)]
        self._read(token_ids, self._it.new())

    def _share(self) -> None:
        """Begin as another one does, from what that has published."""
        token_ids, pair = self._rng.choice(self._held)
        if len(token_ids) == 1:
            return
        found = []
        for runner, cache in zip(self._it.runners, pair, strict=True):
            runner.publish("key", token_ids[:-1], cache)
            found.append(runner.find_prefix("key", token_ids[:-1]) or runner.new_cache())
        one, other = found
        assert isinstance(one, PagedCache)
        assert isinstance(other, PagedCache)
        assert one.num_tokens == other.num_tokens
        self._read(token_ids[:-1], (one, other))

    def _fork(self) -> None:
        token_ids, pair = self._rng.choice(self._held)
        num_tokens = self._rng.randint(0, pair[0].num_tokens)
        one, other = (cache.fork(num_tokens) for cache in pair)
        assert one is not None
        assert other is not None
        self._held.append((token_ids[: num_tokens + 1], (one, other)))

    def _truncate(self) -> None:
        token_ids, pair = self._rng.choice(self._held)
        num_tokens = self._rng.randint(0, pair[0].num_tokens)
        for cache in pair:
            cache.truncate(num_tokens)
        del token_ids[num_tokens + 1 :]

    def _swap(self) -> None:
        _, pair = self._rng.choice(self._held)
        for cache, store in zip(pair, self._stores, strict=True):
            if cache.num_tokens:
                cache.swap_out(store)
        self._decode_some([held for held in self._held if held[1] is not pair])
        for cache in pair:
            if cache.is_swapped:
                cache.swap_in()

    def _go(self) -> None:
        _, pair = self._held.pop(self._rng.randrange(len(self._held)))
        for cache in pair:
            cache.drop()

    def _read(self, token_ids: list[int], pair: Pair) -> None:
        decoding = [([ids[-1]], other) for ids, other in self._held]
        *tokens, token = self._it.step([*decoding, (token_ids[pair[0].num_tokens :], pair)])
        for (ids, _), sampled in zip(self._held, tokens, strict=True):
            ids.append(sampled)
        self._held.append(([*token_ids, token], pair))

    def _decode(self) -> None:
        self._decode_some(self._held)

    def _decode_some(self, held: Sequence[tuple[list[int], Pair]]) -> None:
        some = [one for one in held if self._rng.random() < 0.8]
        if some:
            tokens = self._it.step([([ids[-1]], pair) for ids, pair in some])
            for (ids, _), token in zip(some, tokens, strict=True):
                ids.append(token)
