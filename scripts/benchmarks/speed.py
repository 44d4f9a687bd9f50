"""Decode and prefill at batch 1: our runner in each format, transformers, and llama.cpp."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.contender import (
    PREFILL_CHUNK,
    Contender,
    OurRunner,
    TransformersGenerate,
    TransformersLoop,
)
from scripts.benchmarks.figures import Figure, figure, ratio
from scripts.benchmarks.pairing import again, alternate
from scripts.benchmarks.section import Grid, Section

LLAMA_CPP_KINDS = ("Q8_0", "BF16", "Q4_1")

Rows = dict[str, dict[str, Figure]]


def run(bench: Bench) -> Section:
    """Measure the section."""
    contexts = bench.pick((128, 1024, 4096), (512,))
    prompts = bench.pick((512, 2048), (512,))
    steps = bench.pick(16, 6)
    dtypes = bench.pick(bench.dtypes, (bench.auto_dtype,))
    ours = {dtype: OurRunner(bench.runner(dtype), f"ours {dtype}") for dtype in dtypes}
    cuda = [OurRunner(runner, f"ours {name}") for name, runner in bench.cuda_runners.items()]
    contenders = [*ours.values(), *cuda, *_transformers(bench), *llama_cpp_contenders(bench)]
    noise = ours[bench.auto_dtype].name
    decode: Rows = {}
    prefill: Rows = {}
    for context in contexts:
        for contender in contenders:
            contender.hold(context)
        measurements = {c.name: partial(_decode_rate, c, steps) for c in contenders}
        _add(decode, f"at {context:,}", _in_turns(bench, measurements, noise, (7, 3), 1))
    for contender in contenders:
        contender.hold(0)
    for length in prompts:
        measurements = {
            c.name: partial(_prefill_rate, c, length)
            for c in contenders
            if not isinstance(c, TransformersGenerate)
        }
        _add(
            prefill,
            f"of {length:,}",
            _in_turns(bench, measurements, noise, (5, 2), bench.pick(1, 0)),
        )
    return Section(
        "speed",
        "decode and prefill, one sequence",
        [
            Grid("decode, tokens/s", decode),
            Grid("decode, ratios", _ratios(decode, list(ours), noise) | _of_graphs(decode, cuda)),
            Grid("prefill, tokens/s", prefill),
            Grid("prefill, ratios", _ratios(prefill, list(ours), noise)),
        ],
        {
            "our_threads": bench.threads,
            "transformers_threads": bench.reference_threads,
            "llama_cpp_threads": bench.reference_threads if bench.llama_cpp else None,
            "auto_dtype": bench.auto_dtype,
            "steps_per_sample": steps,
            "our_prefill_chunk": PREFILL_CHUNK,
        },
        []
        if bench.llama_cpp
        else ["llama.cpp was not compared: --llama-cpp-python names its home"],
    )


def llama_cpp_contenders(bench: Bench, kinds: Sequence[str] = LLAMA_CPP_KINDS) -> list[Contender]:
    """Return those of llama.cpp, if it is to be compared."""
    llama_cpp = bench.llama_cpp
    return [llama_cpp.contender(kind) for kind in kinds] if llama_cpp else []


def _transformers(bench: Bench) -> list[Contender]:
    contenders: list[Contender] = []
    for dtype in ("float32", "bfloat16"):
        loop = TransformersLoop(bench.hf_model(dtype), bench.reference_threads, dtype)
        contenders += [loop, TransformersGenerate(loop, dtype)]
    return contenders


def _decode_rate(contender: Contender, num_steps: int) -> float:
    return num_steps / contender.decode(num_steps)


def _prefill_rate(contender: Contender, num_tokens: int) -> float:
    return num_tokens / contender.prefill(num_tokens)


def _in_turns(
    bench: Bench,
    measurements: Mapping[str, Callable[[], float]],
    noise: str,
    rounds: tuple[int, int],
    warm_ups: int,
) -> dict[str, Figure]:
    samples = alternate(
        {**measurements, again(noise): measurements[noise]},
        bench.repeats(*rounds),
        settle=bench.settle,
        warm_ups=warm_ups,
    )
    return {name: figure(values, "tokens/s") for name, values in samples.items()}


def _add(rows: Rows, column: str, figures: Mapping[str, Figure]) -> None:
    for name, one in figures.items():
        rows.setdefault(name, {})[column] = one


def _ratios(rows: Rows, dtypes: Sequence[str], noise: str) -> Rows:
    """Return each of ours over the best row of each of the others, and what is noise."""
    ratios: Rows = {}
    columns = list(rows[noise])
    for rival in ("llama.cpp", "transformers"):
        names = [name for name in rows if name.startswith(rival)]
        for dtype in dtypes if names else ():
            label = f"ours {dtype} / best {rival}"
            ratios[label] = {
                column: ratio(rows[f"ours {dtype}"][column], best(rows, names, column))
                for column in columns
            }
    ratios[f"A/A: {noise}"] = {
        column: ratio(rows[again(noise)][column], rows[noise][column]) for column in columns
    }
    return ratios


def _of_graphs(rows: Rows, cuda: Sequence[Contender]) -> Rows:
    """Return what decodes with CUDA graphs over what does so without, if there is CUDA."""
    if not cuda:
        return {}
    with_graphs, without = (rows[contender.name] for contender in cuda)
    return {
        "CUDA: graphs / none": {
            column: ratio(one, without[column]) for column, one in with_graphs.items()
        }
    }


def best(rows: Rows, names: Sequence[str], column: str) -> Figure:
    """Return the highest median of ``column`` among the rows of ``names``."""
    return max((rows[name][column] for name in names), key=lambda one: one.median)
