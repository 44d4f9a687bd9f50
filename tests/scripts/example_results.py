"""Results that are made up: trials whose truth is known, and a whole comparison of them."""

import random
from collections.abc import Iterable, Mapping, Sequence

from scripts.comparison import measures
from scripts.comparison.results import AgentRun, Agreement, Design, Results, Split, Trial, Turn

Times = Mapping[str, float] | Mapping[Design, float]

COMMAND = "scripts/compare --out 'a <folder>' && echo done"


def turn(
    parts: Split,
    *,
    input_tokens: int = 100,
    cached_tokens: int = 90,
    tokens_forwarded: int | None = 20,
    tool_seconds: float = 0.0,
    bytes_sent: int = 1000,
) -> Turn:
    first_token = parts.pre_inference + parts.queue + parts.prefill
    return Turn(
        seconds=measures.total_seconds(parts),
        first_event_seconds=first_token + parts.network / 2,
        first_token_seconds=first_token,
        split=parts,
        tool_seconds=tool_seconds,
        input_tokens=input_tokens,
        cached_tokens=cached_tokens,
        output_tokens=24,
        tokens_forwarded=tokens_forwarded,
        bytes_sent=bytes_sent,
        bytes_received=5000,
    )


def split(
    *,
    network: float = 0.0,
    pre_inference: float = 0.0,
    queue: float = 0.0,
    prefill: float = 0.0,
    decode: float = 0.0,
    post_inference: float = 0.0,
) -> Split:
    return Split(
        network=network,
        pre_inference=pre_inference,
        queue=queue,
        prefill=prefill,
        decode=decode,
        post_inference=post_inference,
    )


def trial(
    design: str,
    turns: Sequence[Turn],
    *,
    experiment: str = "calls",
    engine: str = "int4",
    workload: str = "20 calls",
    x: float = 20,
    round_number: int = 0,
    concurrency: int = 1,
) -> Trial:
    seconds = sum(each.seconds for each in turns)
    run = AgentRun(
        seconds=seconds,
        wall_seconds=seconds + sum(each.tool_seconds for each in turns),
        turns=list(turns),
    )
    return Trial(
        experiment=experiment,
        engine=engine,
        workload=workload,
        x=x,
        design=design,
        round=round_number,
        concurrency=concurrency,
        runs=[run] * concurrency,
        seconds=run.wall_seconds,
        cpu_seconds=0.4 * seconds * concurrency,
        counts=_counts(turns, concurrency),
        loop_lag={"0.001": 90.0, "0.005": 99.0, "+Inf": 100.0},
    )


def _counts(turns: Sequence[Turn], concurrency: int) -> dict[str, float]:
    forwarded = sum(each.tokens_forwarded or 0 for each in turns)
    parsed = sum(each.bytes_sent for each in turns) / 500
    counts = {
        "tokens_forwarded": float(forwarded),
        "tokens_reforwarded": 0.0,
        "template_renders": float(len(turns)),
        "encodes": 2.0 * len(turns),
        "tokens_encoded": float(forwarded),
    }
    for stage in ("parse", "render", "encode", "classify_input", "classify_output", "store"):
        counts[f"stage_runs:{stage}"] = float(len(turns))
        counts[f"stage_items:{stage}"] = parsed
        counts[f"stage_seconds:{stage}"] = 1e-5 * parsed
    return {name: value * concurrency for name, value in counts.items()}


def paired(
    seconds: Times,
    *,
    num_rounds: int = 5,
    noise: float = 0.0,
    num_turns: int = 21,
    experiment: str = "calls",
    engine: str = "int4",
    workload: str = "20 calls",
    x: float = 20,
    tool_seconds: float = 0.0,
    seed: int = 0,
) -> list[Trial]:
    """Return rounds in which each design takes that long for a run, and the machine's pace varies
    from round to round; ``noise`` is the standard deviation of each figure on top of it."""
    numbers = random.Random(seed)
    trials = []
    for number in range(num_rounds):
        pace = numbers.uniform(0.7, 1.4)
        for design, of_run in seconds.items():
            each = pace * of_run / num_turns * (1 + noise * numbers.gauss(0, 1))
            turns = [turn(split(decode=each), tool_seconds=tool_seconds)] * num_turns
            trials.append(
                trial(
                    design,
                    turns,
                    experiment=experiment,
                    engine=engine,
                    workload=workload,
                    x=x,
                    round_number=number,
                )
            )
    return trials


# --- A whole comparison --------------------------------------------------------------------------

_ALL = (
    *(Design.STATELESS_CACHE, Design.AGAIN, Design.CHAINED, Design.SUSPENDED),
    *(Design.SUSPENDED_AGAIN, Design.SUSPENDED_INJECT, Design.STATELESS),
)
_CONNECTIONS = (*_ALL, Design.STATELESS_CACHE_RECONNECT, Design.STATELESS_RECONNECT)

_HELD = {
    Design.SUSPENDED: (0.0006, 0.0008),
    Design.SUSPENDED_AGAIN: (0.0006, 0.0008),
    Design.SUSPENDED_INJECT: (0.0006, 0.0009),
    Design.CHAINED: (0.0010, 0.0020),
}
"""Seconds of network and of pre-inference, whatever the context."""


def _turn_of(
    design: Design, context: int, new: int, pace: float, tool_seconds: float, noise: random.Random
) -> Turn:
    """Return a turn as a server might have it that samples ``pace`` tokens a second."""
    is_fresh = design in (Design.STATELESS, Design.STATELESS_RECONNECT)
    read = context if is_fresh else new
    network, pre_inference = _HELD.get(
        design, (0.0015, 0.002 + (4e-6 if is_fresh else 1e-6) * context)
    )
    if design in (Design.STATELESS_CACHE_RECONNECT, Design.STATELESS_RECONNECT):
        network += 0.002
    wobble = noise.gauss(1, 0.02)
    parts = split(
        network=wobble * network,
        pre_inference=wobble * pre_inference,
        queue=0.0001,
        prefill=wobble * read / (20 * pace),
        decode=wobble * 24 / pace,
        post_inference=wobble * 0.0008,
    )
    return turn(
        parts,
        input_tokens=context,
        cached_tokens=context - read,
        tokens_forwarded=read + 24,
        tool_seconds=tool_seconds,
        bytes_sent=200 + 4 * (new if design in _HELD else context),
    )


def _cell(
    designs: Iterable[Design],
    *,
    experiment: str,
    engine: str,
    workload: str,
    x: float,
    num_calls: int = 10,
    context: int = 300,
    new: int = 60,
    tool_seconds: float = 0.0,
    concurrency: int = 1,
) -> list[Trial]:
    noise = random.Random(f"{experiment} {engine} {workload}")
    pace = float(engine.split()[-1]) if engine.startswith("simulated") else 240.0
    return [
        trial(
            design,
            [
                _turn_of(
                    design,
                    context + index * (new + 24),
                    new if index else context,
                    pace / concurrency**0.5,
                    tool_seconds if index < num_calls else 0.0,
                    noise,
                )
                for index in range(num_calls + 1)
            ],
            experiment=experiment,
            engine=engine,
            workload=workload,
            x=x,
            round_number=number,
            concurrency=concurrency,
        )
        for number in range(5)
        for design in designs
    ]


def example() -> Results:
    """Return a whole comparison, of a server that is made up."""
    trials: list[Trial] = []
    for engine in ("int4", "simulated 1000"):
        for calls in (1, 5, 10, 20, 43):
            label = f"{calls} calls"
            trials += _cell(
                _ALL, experiment="calls", workload=label, x=calls, num_calls=calls, engine=engine
            )
        for context in (256, 1000, 3000, 6000):
            trials += _cell(
                _ALL,
                experiment="context",
                workload=f"{context} tokens",
                x=context,
                context=context,
                engine=engine,
            )
        for new in (20, 200, 600):
            trials += _cell(
                _ALL,
                experiment="results",
                workload=f"results of {new} tokens",
                x=new,
                new=new,
                engine=engine,
            )
        for label, seconds in (("none", 0.0), ("50 ms", 0.05), ("500 ms", 0.5)):
            trials += _cell(
                _ALL,
                experiment="tools",
                workload=label,
                x=seconds,
                tool_seconds=seconds,
                engine=engine,
            )
        for agents in (1, 4, 16):
            trials += _cell(
                _ALL,
                experiment="concurrency",
                workload=f"{agents} agents",
                x=agents,
                concurrency=agents,
                engine=engine,
            )
        trials += _cell(
            _CONNECTIONS, experiment="connections", workload="10 calls", x=10, engine=engine
        )
    for pace in (65, 1000, 4000):
        trials += _cell(
            _ALL,
            experiment="pace",
            engine=f"simulated {pace}",
            workload=f"{pace} tokens/s",
            x=pace,
            num_calls=20,
        )
    trials += _cell(
        _ALL,
        experiment="traces",
        engine="int4",
        workload="coding-agent",
        x=42,
        num_calls=42,
        new=120,
    )
    trials += outside()
    return Results(
        command=COMMAND,
        began_at=1_750_000_000,
        seconds=2712.0,
        is_complete=True,
        machine={"processor": "made up", "cores": 2, "vectors": ["avx2", "avx512f"]},
        versions={"python": "3.11.9"},
        settings={"threads": 2, "workloads": {"calls": [1, 5]}},
        trials=trials,
        agreements=[
            Agreement(
                design=design,
                sampler="greedy",
                num_runs=8,
                num_turns=40,
                num_tokens=1900,
                equal_runs=8 if design != Design.STATELESS else 5,
                drifted_turns=0 if design != Design.STATELESS else 4,
                differing_tokens=0 if design != Design.STATELESS else 61,
            )
            for design in (Design.CHAINED, Design.STATELESS_CACHE, Design.STATELESS)
        ],
        notes=["The float32 server was not measured: it had no memory."],
    )


def outside() -> list[Trial]:
    """Return what a server of others took, which does not tell where its time goes."""
    told = turn(split(network=0.002, prefill=0.3, decode=0.2), tokens_forwarded=None)
    untold = Turn(
        **{name: getattr(told, name) for name in told.__struct_fields__}
        | {"split": None, "first_token_seconds": None}
    )
    return [
        trial(
            "llama.cpp server",
            [untold] * 43,
            experiment="traces",
            engine="Q4_1",
            workload="coding-agent",
            x=42,
            round_number=number,
        )
        for number in range(3)
    ]
