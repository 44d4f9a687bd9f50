"""What it costs to go on after a tool call: the keys and values still there, or computed again."""

from functools import partial

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import PREFILL_CHUNK, Contender, OurRunner
from scripts.benchmarks.figures import Figure, figure, ratio
from scripts.benchmarks.pairing import again, alternate
from scripts.benchmarks.section import Grid, Section
from scripts.benchmarks.speed import llama_cpp_contenders

APPENDED_TOKENS = 64

Rows = dict[str, dict[str, Figure]]


def run(bench: Bench) -> Section:
    """Measure the section."""
    contexts = bench.pick((512, 2048, 6000), (512, 1024))
    dtypes = dict.fromkeys(bench.pick((bench.auto_dtype, *bench.dtypes), (bench.auto_dtype,)))
    ours = [OurRunner(bench.runner(dtype), f"ours {dtype}") for dtype in dtypes]
    rivals = llama_cpp_contenders(bench, bench.pick(("Q8_0", "BF16", "Q4_1"), ("Q8_0",)))
    contenders = [*ours, *rivals]
    noise = ours[0].name
    intact: Rows = {}
    again_from_nothing: Rows = {}
    for context in contexts:
        column = f"at {context:,}"
        for name, one in _append(bench, contenders, noise, context).items():
            intact.setdefault(name, {})[column] = one
        for name, one in _prefill(bench, contenders, noise, context).items():
            again_from_nothing.setdefault(name, {})[column] = one
    for contender in contenders:
        contender.hold(0)
    return Section(
        "resume",
        f"to read {APPENDED_TOKENS} more tokens and know the next one",
        [
            Grid("keys and values intact, ms", intact),
            Grid("all of it computed again, ms", again_from_nothing),
            Grid("computed again / intact", _cost_of_losing(intact, again_from_nothing)),
            Grid("intact, llama.cpp / ours", _ratios(intact, noise)),
        ],
        {
            "our_threads": bench.threads,
            "llama_cpp_threads": bench.reference_threads if rivals else None,
            "auto_dtype": bench.auto_dtype,
            "our_prefill_chunk": PREFILL_CHUNK,
        },
    )


def _append(
    bench: Bench, contenders: list[Contender], noise: str, context: int
) -> dict[str, Figure]:
    for contender in contenders:
        contender.hold(context)
    measurements = {c.name: partial(_append_ms, c) for c in contenders}
    samples = alternate(
        {**measurements, again(noise): measurements[noise]},
        bench.repeats(7, 3),
        settle=bench.settle,
        warm_ups=1,
    )
    return {name: figure(values, "ms") for name, values in samples.items()}


def _prefill(
    bench: Bench, contenders: list[Contender], noise: str, context: int
) -> dict[str, Figure]:
    measurements = {c.name: partial(_prefill_ms, c, context) for c in contenders}
    samples = alternate(
        {**measurements, again(noise): measurements[noise]},
        bench.repeats(3, 1),
        settle=bench.settle,
    )
    return {name: figure(values, "ms") for name, values in samples.items()}


def _append_ms(contender: Contender) -> float:
    return 1000 * contender.append(APPENDED_TOKENS)


def _prefill_ms(contender: Contender, context: int) -> float:
    return 1000 * contender.prefill(context + APPENDED_TOKENS)


def _cost_of_losing(intact: Rows, again_from_nothing: Rows) -> Rows:
    return {
        name: {column: ratio(each, intact[name][column]) for column, each in row.items()}
        for name, row in again_from_nothing.items()
    }


def _ratios(intact: Rows, noise: str) -> Rows:
    """Return by how much ours is faster than the fastest of llama.cpp, and what is noise."""
    rivals = [name for name in intact if name.startswith("llama.cpp")]
    ratios: Rows = {}
    for name, row in intact.items():
        if rivals and name.startswith("ours") and name != again(noise):
            ratios[f"best llama.cpp / {name}"] = {
                column: ratio(_fastest(intact, rivals, column), each)
                for column, each in row.items()
            }
    ratios[f"A/A: {noise}"] = {
        column: ratio(each, intact[noise][column]) for column, each in intact[again(noise)].items()
    }
    return ratios


def _fastest(rows: Rows, names: list[str], column: str) -> Figure:
    return min((rows[name][column] for name in names), key=lambda one: one.median)
