"""Outside servers: the same agent runs held by llama.cpp's server and by ``transformers serve``.

Both are asked for chat completions with the whole history each time, streamed over a connection
that is kept alive, and each has a prefix cache of its own. They run the embedded model, and their
prompts have the tokens that our own server would make of them (``outside_steps``).

What they sample cannot be chosen. So each turn asks for as many tokens as the trace's turn has,
with the ends of turns ruled out, throws the text away, and goes on with the trace's own turn in the
history. The lengths are those of the trace. But the tokens of the turn, which a real client would
have got from the server, are in no cache, and are read as part of the next prompt.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from types import MappingProxyType

from scripts.benchmarks.pairing import wait_until_idle
from scripts.comparison.outside_process import RunningServer, running
from scripts.comparison.outside_servers import BaselineError, OutsideServer
from scripts.comparison.outside_steps import embedded_tokenizer, steps_of
from scripts.comparison.results import Trial
from scripts.comparison.trials import WARM_UP, Numbers
from scripts.comparison.workloads import Workload

Measure = Callable[[int], Awaitable[Trial]]
"""Measures one trial of the round that has this number, and returns it."""


async def measure_baselines(
    servers: Iterable[OutsideServer],
    workload: Workload,
    rounds: Iterable[int],
    *,
    experiment: str,
    x: float,
    threads: int,
    numbers: Numbers,
    taken: Callable[[Trial], None],
    begun: Callable[[str], None] = lambda name: None,
    ours: Mapping[str, Measure] = MappingProxyType({}),
) -> list[str]:
    """Hold a workload on each of ``servers`` and on ours, in turns, and return notes.

    All run for as long as it takes; they come to rest before the next one is measured. One that
    does not start or fails is left out from then on, and a note says why; the trials that it ended
    stay. When none is left, ours are not measured any more either.

    Args:
        servers: are started.
        workload: what each is to do.
        rounds: the numbers of those that are kept, which come after one that warms up.
        experiment: as a trial has it.
        x: the same.
        threads: that each of ``servers`` computes with.
        numbers: of the agent runs.
        taken: is given each trial as soon as it is over, ours too.
        begun: is told the name of who is started or measured next.
        ours: what measures the workload on a server of this project, by a name. What that raises is
            raised.
    """
    tokenizer = embedded_tokenizer()
    labels = {"experiment": experiment, "workload": workload.label, "x": x}

    async def measure(name: str, round_number: int) -> Trial:
        if name in ours:
            return await ours[name](round_number)
        traces = map(numbers.unlike_all_others, workload.traces())
        runs = [steps_of(trace, tokenizer) for trace in traces]
        await asyncio.to_thread(wait_until_idle, [server.pid for server in outside.values()])
        return await outside[name].measure(runs, round=round_number, **labels)

    outside: dict[str, RunningServer] = {}
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        for server in servers:
            begun(server.name)
            try:
                started = await stack.enter_async_context(running(server, threads))
            except BaselineError as error:
                notes.append(f"{server.name} is left out: {error}")
            else:
                outside[server.name] = started
                notes += server.notes
        for round_number in chain([WARM_UP], rounds):
            if not outside:
                break
            for name in _rotated([*ours, *outside], round_number):
                begun(name)
                try:
                    trial = await measure(name, round_number)
                except BaselineError as error:
                    outside.pop(name).stop()
                    notes.append(f"{name} is left out from round {round_number} on: {error}")
                    continue
                if round_number != WARM_UP:
                    taken(trial)
        return notes + [
            f"{server.name} ended {server.num_short_turns} turns before they had their tokens."
            for server in outside.values()
            if server.num_short_turns
        ]


def _rotated(names: Sequence[str], round_number: int) -> list[str]:
    """Return the names in the order of a round: in each another one begins."""
    first = round_number % len(names)
    return [*names[first:], *names[:first]]
