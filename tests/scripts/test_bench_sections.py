"""Every section measures something, here with a tiny model or none."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sampler.cache_pool import BlockPool
from sampler.counters import Counters
from sampler.engines.simulated.model import SMALL_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.kv_cache import KVCache, PagedCache, PagedStorage
from sampler.model_runner import ModelRunner, Piece
from sampler.sampling import Logits
from sampler.suspension_policy import Mode, SuspensionPolicy
from sampler.waste import Disposition, Rates, Suspended
from scripts.benchmarks import batching, designs, exact, passage, policies, resume, speed
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import OurRunner, TransformersGenerate, TransformersLoop
from scripts.benchmarks.designs import Held, Workload
from scripts.benchmarks.policies import Outcome, Stop
from scripts.benchmarks.section import Section
from scripts.benchmarks.watched_caches import Fate, WatchedCaches
from tests.tiny_model import IM_END, IM_START, byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class QuietBench(Bench):
    """Takes it that nothing else computes."""

    num_settled = 0

    def settle(self) -> None:
        self.num_settled += 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that the compiled kernels cover, over bytes."""
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def bench(directory: Path) -> Iterator[QuietBench]:
    with QuietBench(
        is_quick=True, repeats=2, threads=1, reference_threads=1, model_directory=directory
    ) as bench:
        yield bench


def check(section: Section) -> None:
    """Make sure that a program can read it, and that there is something in it."""
    grids = section.as_json()["grids"]
    figures = [
        figure for grid in grids.values() for row in grid.values() for figure in row.values()
    ]
    assert figures
    assert all(figure["low"] <= figure["median"] <= figure["high"] for figure in figures)
    assert all(grid.table().row_count for grid in section.grids)


@pytest.mark.slow
def test_speed_compares_our_runner_with_transformers(bench: QuietBench) -> None:
    section = speed.run(bench)

    check(section)
    decode, ratios, prefill, _ = section.grids
    assert set(decode.rows) == {
        f"ours {bench.auto_dtype}",
        *(f"ours {name}" for name in bench.cuda_runners),
        *(
            f"transformers {how} {dtype}"
            for how in ("loop", "generate")
            for dtype in ("float32", "bfloat16")
        ),
        f"ours {bench.auto_dtype}, again",
    }
    assert len(decode.rows[f"ours {bench.auto_dtype}"]["at 512"].samples) == 2
    assert f"ours {bench.auto_dtype} / best transformers" in ratios.rows
    assert f"A/A: ours {bench.auto_dtype}" in ratios.rows
    assert not any("generate" in name for name in prefill.rows)
    assert bench.num_settled


@pytest.mark.slow
def test_speed_compares_graphs_with_none_where_there_is_cuda(
    bench: QuietBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bench.runner(bench.auto_dtype)
    monkeypatch.setattr(bench, "cuda_runners", {"CUDA": runner, "CUDA, no graphs": runner})

    section = speed.run(bench)

    check(section)
    decode, ratios, *_ = section.grids
    assert {"ours CUDA", "ours CUDA, no graphs"} <= set(decode.rows)
    assert "at 512" in ratios.rows["CUDA: graphs / none"]


@pytest.mark.slow
def test_batching_compares_batches_and_runs_with_one(bench: QuietBench) -> None:
    section = batching.run(bench)

    check(section)
    _, ratios, engine, _ = section.grids
    assert ratios.rows[f"runner {bench.auto_dtype}"]["1 sequence"].median == 1.0
    assert set(engine.rows["prompts and all"]) == {"1 run", "8 runs", "1 run, again"}


@pytest.mark.slow
def test_resume_compares_what_is_kept_with_what_is_computed_again(bench: QuietBench) -> None:
    section = resume.run(bench)

    check(section)
    ours = f"ours {bench.auto_dtype}"
    lost = section.grids[2].rows[ours]
    assert lost["at 1,024"].median > 1.0
    assert all(f"{ours}, again" in grid.rows for grid in section.grids[:3])


@pytest.mark.slow
def test_exact_tells_speed_and_quality(bench: QuietBench) -> None:
    section = exact.run(bench)

    check(section)
    quality = section.grids[2].rows
    assert set(quality) == {"float32", bench.auto_dtype}
    assert quality["float32"]["greedy agreement"].median == 1.0
    # Random weights over 259 tokens know nothing.
    assert 200 < quality["float32"]["perplexity"].median < 350
    assert abs(quality[bench.auto_dtype]["change, %"].median) < 1


@pytest.mark.slow
def test_the_usual_format_is_measured_with_keys_and_values_in_8_bits_too(
    bench: QuietBench,
) -> None:
    assert bench.dtypes[-1] == f"{bench.auto_dtype}, KV in int8"

    runner = bench.runner(bench.dtypes[-1])

    assert runner.dtype is torch.int8
    pool = runner.new_cache().table.pool
    assert pool.num_blocks == bench.runner(bench.auto_dtype).new_cache().table.pool.num_blocks


@pytest.mark.slow
def test_contenders_leave_their_context_as_it_was(bench: QuietBench) -> None:
    loop = TransformersLoop(bench.hf_model("float32"), 1, "float32")
    ours = OurRunner(bench.runner("float32"), "ours")
    generate = TransformersGenerate(loop, "float32")
    for contender in (loop, ours, generate):
        contender.hold(70)
        contender.hold(40)

        assert contender.decode(3) > 0
        assert contender.append(5) > 0
        assert contender.prefill(6) > 0

    assert loop.num_held == 40
    assert torch.get_num_threads() == 1
    ours.hold(0)


def test_agreement_is_the_share_before_the_first_difference() -> None:
    assert exact.agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert exact.agreement([1, 2], [1, 2]) == 1.0


def test_windows_are_different_and_of_one_length(directory: Path) -> None:
    windows = passage.windows(directory, 5, 100)

    assert [len(window) for window in windows] == [100] * 5
    assert len({tuple(window) for window in windows}) == 5
    with pytest.raises(ValueError, match="do not hold"):
        passage.windows(directory, 500, 100)


# --- Policies -------------------------------------------------------------------------------------

RATES = Rates(0.001, 0.001, 0.0001, 0.0001)


def test_the_workload_is_always_the_same() -> None:
    first = policies.Workload.drawn(3, scale=1.0)

    assert first == policies.Workload.drawn(3, scale=1.0)
    assert [len(calls) for calls in first.calls] == [3] * 20
    assert {name for calls in first.calls for name, _ in calls} == set(policies.TOOL_TIMES)


def caches_of(number: int, num_tokens: int = 20) -> list[PagedCache]:
    storage = PagedStorage(BlockPool(8), *SMALL_KV)
    caches = [storage.new_cache() for _ in range(number)]
    for cache in caches:
        cache.extend_to(num_tokens)
        cache.advance(num_tokens)
    return caches


@pytest.mark.parametrize("mode", Mode)
def test_what_becomes_of_a_suspended_cache_is_noted(mode: Mode, tmp_path: Path) -> None:
    [cache] = caches_of(1)
    parked = WatchedCaches(SuspensionPolicy(mode), Counters(), tmp_path)
    with closing(parked):
        parked.hold(cache)
        parked.suspend(cache, ["search"], since=5.0)

        fate = parked.fates[5.0]
        assert fate.back_at == 0.0
        parked.take(cache)
        # What becomes of it when the run is over is another matter.
        parked.keep(cache)
        for eviction in parked.evictions(0):
            parked.evict(eviction)

    assert fate.back_at > 0.0
    assert fate.disposition is Disposition[mode.name if mode is not Mode.AUTO else "PRESERVE"]
    assert fate.facts == Suspended(num_tokens=20, num_blocks=2)


def test_a_cache_that_goes_before_its_run_is_suspended_is_noted_too(
    tmp_path: Path,
) -> None:
    cache, working = caches_of(2)
    parked = WatchedCaches(SuspensionPolicy(Mode.DISCARD), Counters(), tmp_path)
    with closing(parked):
        parked.hold(cache)
        [eviction] = parked.evictions(0)
        parked.evict(eviction)
        parked.suspend(cache, ["search"], since=5.0)

        fate = parked.fates[5.0]

    assert working.num_tokens == 20
    assert fate.disposition is Disposition.DISCARD
    assert fate.gone_at > 0.0
    # Of the other cache, which somebody works on, in whole blocks.
    assert fate.facts == Suspended(num_tokens=20, num_blocks=2, num_running_tokens=32)


@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.DISCARD])
def test_the_memory_of_who_is_being_sampled_is_noted_when_it_is_taken(
    mode: Mode, tmp_path: Path
) -> None:
    [cache] = caches_of(1)
    parked = WatchedCaches(SuspensionPolicy(mode), Counters(), tmp_path)
    with closing(parked):
        parked.set_aside(cache, 50)

    assert parked.preemptions == [(Suspended(20, 2, 30), Disposition[mode.name])]


HUNDRED = Suspended(num_tokens=100, num_blocks=7, num_running_tokens=50)
# To compute it again: 1 s, in which half of it is held, and the others are held up.
# To write and to read it: 7 s, in which all are held up. To queue: 2 s.
WORK = Rates(0.0, 0.01, 0.5, 0.5, requeue_seconds=2.0)
DISCARDED, SWAPPED = 100 / 2 + 50 + 2 * 100, 7 * 150 + 2 * 100


@pytest.mark.parametrize(
    ("disposition", "held_seconds", "tool_seconds", "wasted", "least"),
    [
        (Disposition.PRESERVE, 0.0, 2.5, 250, 250),
        (Disposition.PRESERVE, 0.0, 9.0, 900, DISCARDED),
        (Disposition.DISCARD, 0.0, 9.0, DISCARDED, DISCARDED),
        (Disposition.DISCARD, 4.0, 9.0, 400 + DISCARDED, DISCARDED),
        (Disposition.SWAP, 0.0, 9.0, SWAPPED, DISCARDED),
        (Disposition.SWAP, 1.0, 0.5, 100 + SWAPPED, 50),  # it went when it was wanted already
    ],
)
def test_a_suspension_is_charged_for_what_became_of_its_cache(
    disposition: Disposition, held_seconds: float, tool_seconds: float, wasted: float, least: float
) -> None:
    fate = Fate(HUNDRED, disposition, gone_at=30.0 + held_seconds)

    stop = Stop(tool_seconds, 30.0, fate, queue_seconds=0.0)

    assert stop.waste(WORK) == pytest.approx(wasted)
    assert stop.oracle_waste(WORK) == pytest.approx(least)


def test_a_policy_is_charged_for_all_its_suspensions_and_apart_from_them_for_preemptions() -> None:
    stayed = Stop(9.0, 30.0, Fate(HUNDRED), queue_seconds=0.0)
    went = Stop(9.0, 30.0, Fate(HUNDRED, Disposition.DISCARD, gone_at=30.0), queue_seconds=4.0)
    outcome = Outcome([stayed, went], [(HUNDRED, Disposition.SWAP)], [1.0], [1.0], defaultdict(int))

    row = policies.row([outcome], WORK)

    assert row["waste, token-seconds"].median == pytest.approx(900 + DISCARDED)
    assert row["regret"].median == pytest.approx((900 + DISCARDED) / (2 * DISCARDED) - 1)
    assert row["preempted, token-seconds"].median == pytest.approx(SWAPPED)
    assert [row[name].median for name in ("stayed", "swapped out", "discarded")] == [1, 0, 1]


def test_all_are_charged_with_how_long_those_waited_that_had_lost_their_caches() -> None:
    """It took 3.5 s to read the one that was swapped out."""
    stayed = Stop(9.0, 30.0, Fate(HUNDRED), queue_seconds=100.0)
    swapped = Stop(9.0, 30.0, Fate(HUNDRED, Disposition.SWAP, 30.0), queue_seconds=4.5)
    discarded = Stop(9.0, 30.0, Fate(HUNDRED, Disposition.DISCARD, 30.0), queue_seconds=4.0)
    outcomes = [Outcome([stayed, swapped]), Outcome([discarded])]

    assert policies.with_requeue(WORK, outcomes).requeue_seconds == (1.0 + 4.0) / 2
    assert policies.with_requeue(WORK, [Outcome([stayed])]).requeue_seconds == 0.0


class Cold(ModelRunner):
    """A runner whose first steps take long, by a clock of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.prefill_chunk = runner.prefill_chunk
        self._runner = runner
        self._num_steps = 0
        self.now = 0.0

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self._runner.dtype

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_context(self) -> int:
        return self._runner.max_context

    def new_cache(self) -> KVCache:
        return self._runner.new_cache()

    def forward(self, pieces: Sequence[Piece]) -> Sequence[Logits | None]:
        self._num_steps += 1
        is_cold = self._num_steps <= 4
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        self.now += 1000.0 if is_cold else 0.01 + 0.001 * num_tokens
        return self._runner.forward(pieces)


def test_what_is_done_for_the_first_time_is_in_no_rates(bench: QuietBench) -> None:
    runner = Cold(bench.runner("float32"))

    rates = policies.measured_rates(runner, clock=lambda: runner.now)

    assert rates.step_seconds == pytest.approx(0.01)
    assert rates.token_seconds == pytest.approx(0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_blocks", "disposition"),
    [
        (Mode.SWAP, 64, Disposition.SWAP),
        (Mode.DISCARD, 64, Disposition.DISCARD),
        (Mode.PRESERVE, 1024, Disposition.PRESERVE),
    ],
)
def test_all_runs_of_a_workload_are_sampled_and_each_suspension_is_accounted_for(
    mode: Mode, num_blocks: int, disposition: Disposition
) -> None:
    model = simulated_model(
        script=Script.of_calls(2, "look_up", '{"number": 3}', num_words=8),
        kv_format=SMALL_KV,
        kv_memory=num_blocks * SMALL_KV.block_bytes,
    )
    workload = policies.Workload.drawn(2, scale=0.01, num_runs=4)

    outcome = asyncio.run(policies.sample_all(model, mode, workload, passage.excerpts(4, 400)))

    assert len(outcome.run_seconds) == 4
    assert len(outcome.stops) == len(outcome.resume_seconds) == outcome.num(disposition) == 8
    assert all(stop.fate.facts.num_tokens > 100 for stop in outcome.stops)
    assert all(stop.fate.facts.num_blocks > 6 for stop in outcome.stops)
    assert all(0.0 < stop.oracle_waste(RATES) <= stop.waste(RATES) for stop in outcome.stops)
    assert len(outcome.preemptions) == outcome.counts["preemptions"]


# --- Designs --------------------------------------------------------------------------------------


def test_each_turn_but_the_last_is_made_to_call() -> None:
    workload = Workload(2, 20)

    assert [workload.tool_choice(segment) for segment in range(3)] == [
        "required",
        "required",
        "none",
    ]
    assert len(workload.output_of({"call_id": "c"}, 0)["output"]) == 20


def test_the_designs_are_compared_by_what_they_took() -> None:
    helds = {
        name: [Held(seconds, 10, [0.1, 0.2], 5, tokens, 2, 1)]
        for name, seconds, tokens in (("suspended", 1.0, 50.0), ("stateless", 3.0, 500.0))
    }

    rows = designs.rows_of(helds)

    assert rows["tokens forwarded"]["stateless / suspended"].median == 10.0
    assert rows["whole run, s"]["stateless / suspended"].median == 3.0
    assert rows["last resume, ms"]["suspended"].median == 200.0
