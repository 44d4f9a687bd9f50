"""No mix of suspended runs keeps another one from its end, and each says what it says alone.

vLLM's own paused sessions do: whoever needs the blocks that they hold waits for ever, and so does a
run that was being sampled. The fake does the same. Pools are as small as they can be here. Runs
come, are suspended, go on with long suffixes and are cancelled as hypothesis draws it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sampler.params import Constraint, SamplingParams
from sampler.run import Run
from sampler.suspension import Suspension
from tests.sampler.engines.vllm_runs import FREE, GREEDY, Vllm, play, running, talkative_model

BLOCK_SIZE = 8
MAX_CONTEXT = 96

pytestmark = pytest.mark.slow

PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, seed=1, frequency_penalty=0.8),
)


@dataclass(frozen=True)
class Plan:
    """What becomes of a run."""

    first: int
    num_prompt: int
    suffixes: Sequence[int]
    """Lengths."""
    constraints: Sequence[Constraint]
    """Of the first segment, and of those after each suffix."""
    params: SamplingParams
    arrival: int
    """Turns of the event loop before it comes."""
    waits: Sequence[int | None]
    """Turns of the event loop that its tools take; None: until all runs are over but those that
    wait like this."""
    patience: int | None
    """Turns of the event loop after which it is cancelled."""


@st.composite
def plans(draw: st.DrawFn, first: int) -> Plan:
    num_suffixes = draw(st.integers(1, 3))
    most = draw(st.integers(3, 20))
    params = draw(st.sampled_from(PARAMS))
    return Plan(
        first=first,
        num_prompt=draw(st.integers(8, MAX_CONTEXT - 16)),
        suffixes=draw(st.lists(st.integers(1, 40), min_size=num_suffixes, max_size=num_suffixes)),
        constraints=[FREE, *(draw(st.sampled_from((FREE, Constraint()))) for _ in range(3))],
        params=SamplingParams(**{**vars(params), "max_output_tokens": most}),
        arrival=draw(st.integers(0, 20)),
        waits=[draw(st.none() | st.integers(0, 60)) for _ in range(3)],
        patience=draw(st.sampled_from([None, None, None, None, None, 30])),
    )


@dataclass(frozen=True)
class Scene:
    """A pool, and what is to happen in it."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    fraction: float
    plans: Sequence[Plan]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    least = MAX_CONTEXT // BLOCK_SIZE
    firsts = range(60, 60 + draw(st.integers(2, 8)))
    return Scene(
        num_blocks=draw(st.integers(least, 2 * least)),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 16, 16, 16])),
        max_num_batched_tokens=draw(st.sampled_from([16, 40, 2048])),
        fraction=draw(st.sampled_from([0.25, 0.5, 1.0, 1.0])),
        plans=[draw(plans(first)) for first in firsts],
    )


async def turns(number: int) -> None:
    """Let the event loop turn so often."""
    for _ in range(number):
        await asyncio.sleep(0)


class Others:
    """Tells those who wait for the others when there are none."""

    def __init__(self, num_runs: int) -> None:
        self._num_left = num_runs
        self._none_is_left = asyncio.Event()

    def one_is_out(self) -> None:
        """Count one less: it is over, or waits."""
        self._num_left -= 1
        if self._num_left == 0:
            self._none_is_left.set()

    async def wait(self) -> None:
        """Wait until nobody is left."""
        self.one_is_out()
        await self._none_is_left.wait()


async def lived(vllm: Vllm, plan: Plan, others: Others) -> Run:
    """Let a run live as planned, and return it."""
    await turns(plan.arrival)
    prompt = [plan.first] * plan.num_prompt
    run = vllm.open(prompt, plan.params, plan.constraints[0])
    waits = list(plan.waits)

    is_out = False

    async def wait(suspension: Suspension) -> None:
        nonlocal is_out
        wait = waits.pop(0)
        if wait is not None:
            await turns(wait)
        elif not is_out:
            is_out = True
            await others.wait()

    suffixes = [[plan.first + 20] * length for length in plan.suffixes]
    playing: asyncio.Task[Any] = asyncio.create_task(
        play(vllm, run, suffixes, wait, plan.constraints[1:])
    )
    if plan.patience is not None:
        await turns(plan.patience)
        playing.cancel()
        await asyncio.wait([playing])
    else:
        await playing
    if not is_out:
        others.one_is_out()
    return run


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(scenes())
def test_every_run_ends_and_says_what_it_says_alone(scene: Scene) -> None:
    async def act() -> None:
        async with running(
            talkative_model(eagerness=4.0),
            num_blocks=scene.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=scene.max_num_seqs,
            max_num_batched_tokens=scene.max_num_batched_tokens,
            max_model_len=MAX_CONTEXT,
            suspended_fraction=scene.fraction,
        ) as vllm:
            others = Others(len(scene.plans))
            runs = await asyncio.gather(*(lived(vllm, plan, others) for plan in scene.plans))

            assert vllm.engine.memory.num_used == 0
            for run, plan in zip(runs, scene.plans, strict=True):
                assert run.is_finished
                vllm.check(run, *plan.constraints[: len(run.segments)])
                if plan.patience is None:
                    assert run.tokens_forwarded >= run.num_forwarded - run.num_inherited

    asyncio.run(act())
