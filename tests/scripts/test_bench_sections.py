"""Every section measures something, here with a tiny model or none."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.suspension_policy import Mode
from sampler.swap import SwapStore
from sampler.waste import Disposition, Rates
from scripts.benchmarks import batching, designs, exact, passage, policies, resume, speed
from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import OurRunner, TransformersGenerate, TransformersLoop
from scripts.benchmarks.designs import Held, Workload
from scripts.benchmarks.section import Section
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
        *(
            f"transformers {how} {dtype}"
            for how in ("loop", "generate")
            for dtype in ("float32", "bfloat16")
        ),
        f"ours {bench.auto_dtype}, again",
    }
    assert len(decode.rows[f"ours {bench.auto_dtype}"]["at 1,024"].samples) == 2
    assert f"ours {bench.auto_dtype} / best transformers" in ratios.rows
    assert f"A/A: ours {bench.auto_dtype}" in ratios.rows
    assert not any("generate" in name for name in prefill.rows)
    assert bench.num_settled


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
    lost = section.grids[2].rows[f"ours {bench.auto_dtype}"]
    assert lost["at 2,048"].median > 1.0


@pytest.mark.slow
def test_exact_tells_speed_and_quality(bench: QuietBench) -> None:
    section = exact.run(bench)

    check(section)
    quality = section.grids[2].rows
    assert set(quality) == set(bench.dtypes)
    assert quality["float32"]["greedy agreement"].median == 1.0
    # Random weights over 259 tokens know nothing.
    assert 200 < quality["float32"]["perplexity"].median < 350
    assert abs(quality["int8"]["change, %"].median) < 1


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


async def test_what_became_of_a_cache_is_seen(bench: QuietBench, tmp_path: Path) -> None:
    runner = bench.runner("float32")
    contenders = [OurRunner(runner, "x") for _ in range(3)]
    for contender in contenders:
        contender.hold(20)
    kept, swapped, dropped = (contender.cache for contender in contenders)
    with closing(SwapStore(tmp_path)) as store:
        swapped.swap_out(store)
        dropped.drop()

        now = time.monotonic()
        fates = [await policies.watch(one, now, 0.03) for one in (kept, swapped, dropped)]

        swapped.drop()
    assert fates[0] == (Disposition.PRESERVE, 0.03)
    assert [disposition for disposition, _ in fates[1:]] == [Disposition.SWAP, Disposition.DISCARD]
    assert time.monotonic() - now >= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.DISCARD])
def test_all_runs_of_a_workload_are_sampled_and_accounted_for(mode: Mode) -> None:
    model = simulated_model(
        script=Script.of_calls(2, "look_up", '{"number": 3}', num_words=8),
        kv_format=SMOLLM2_KV,
        kv_memory=64 * SMOLLM2_KV.block_bytes,
    )
    workload = policies.Workload.drawn(2, scale=0.01, num_runs=4)
    rates = policies.measured_rates(model.runner)

    outcome = asyncio.run(
        policies.sample_all(model, mode, workload, passage.excerpts(4, 400), rates)
    )

    assert len(outcome.run_seconds) == 4
    assert len(outcome.wastes) == len(outcome.resume_seconds) == 8
    is_swap = mode is Mode.SWAP
    assert outcome.counts["swaps_out" if is_swap else "discards"] >= 1
    assert outcome.counts["discards" if is_swap else "swaps_out"] == 0
    assert all(least <= wasted for wasted, least in outcome.wastes)


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
