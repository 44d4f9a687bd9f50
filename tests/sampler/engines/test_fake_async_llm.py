"""The fake of vLLM does what vLLM does, and what tests ask of it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.sampler.engines.fake_async_llm import FakeAsyncLLM, fake_async_llm
from tests.sampler.engines.vllm_contract import (
    CLAIMS,
    FATALITIES,
    NUM_BLOCKS,
    PROMPT,
    SETTINGS,
    SUFFIX,
    Claim,
    Engine,
)
from tests.sampler.engines.vllm_types import (
    BatchUpdate,
    EngineDeadError,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
    VLLMValidationError,
)


def engine_of(llm: FakeAsyncLLM) -> Engine:
    """Return ``llm`` as the contract wants it."""
    told = 0

    async def prefilled() -> list[int]:
        nonlocal told
        counts = [count for counts in llm.core.prefilled.values() for count in counts]
        told, since = len(counts), told
        return counts[since:]

    return Engine(
        llm,
        SamplingParams,
        StreamingInput,
        RequestOutputKind.DELTA,
        VLLMValidationError,
        (EngineDeadError,),
        prefilled,
    )


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with fake_async_llm(num_blocks=NUM_BLOCKS, **SETTINGS) as llm:
        yield engine_of(llm)


@pytest.mark.parametrize("claim", [*CLAIMS, *FATALITIES])
async def test_contract(engine: Engine, claim: Claim) -> None:
    await claim(engine)


async def test_a_turn_says_what_it_is_told_to_say_and_then_what_the_model_says(
    engine: Engine,
) -> None:
    engine.llm.core.turns += [(5, 6, 7)]

    turn = await engine.request(PROMPT, 5)

    assert turn.token_ids[:3] == [5, 6, 7]
    following = await engine.request([*PROMPT, 5, 6, 7], 2)
    assert turn.token_ids[3:] == following.token_ids


async def test_a_grammar_is_that_of_the_first_turn_and_of_no_other(engine: Engine) -> None:
    session = engine.session()

    first = await session.turn(PROMPT, 3, structured_outputs=[1, 2, 3, 4, 5])
    second = await session.turn(first.token_ids[-1:], 3, structured_outputs=[9, 9, 9])

    assert [*first.token_ids, *second.token_ids][:5] == [1, 2, 3, 4, 5]
    assert 9 not in second.token_ids


async def test_outputs_that_nobody_took_become_one(engine: Engine) -> None:
    slow, quick = engine.session(), engine.session()
    slow.send(PROMPT, 20)
    first = await anext(slow.outputs)

    await quick.turn(PROMPT, 25)

    rest = await anext(slow.outputs)
    assert len(first.outputs[0].token_ids) + len(rest.outputs[0].token_ids) == 20
    assert rest.outputs[0].finish_reason == "length"


async def test_a_turn_without_tokens_kills_old_releases(engine: Engine) -> None:
    engine.llm.core.dies_of_empty_turns = True
    engine.llm.core.turns += [(5,), (6,)]
    session = engine.session()
    await session.turn(PROMPT, stop_token_ids=[5])

    with pytest.raises(EngineDeadError):
        await session.turn([5, *SUFFIX], stop_token_ids=[6])


async def test_it_stands_still_when_it_may_not_step(engine: Engine) -> None:
    engine.llm.may_step.clear()
    session = engine.session()
    session.send(PROMPT)

    turn = asyncio.create_task(session.rest())

    assert await engine.is_stuck(turn)
    engine.llm.may_step.set()
    assert len((await turn).token_ids) == 12


class _Spy:
    """A processor that forces what ``extra_args`` say, and checks what it is told."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.seen: list[tuple[int, int]] = []
        """Lengths of the prompt and of what was sampled, of each request that was added."""
        self.num_moved = 0

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            assert prompt_ids is not None
            self.rows[row] = params, prompt_ids, output_ids
            self.seen.append((len(prompt_ids), len(output_ids)))
        for source, target, _ in batch_update.moved:
            self.rows[target] = self.rows.pop(source)
            self.num_moved += 1
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        assert len(logits) == len(self.rows)
        for row, (params, _, output_ids) in self.rows.items():
            forced: Sequence[int] = (params.extra_args or {}).get("force", ())
            if len(output_ids) < len(forced):
                logits[row, forced[len(output_ids)]] = 1e6
        return logits


async def test_processors_see_a_resumed_session_as_a_new_request() -> None:
    spy = _Spy()
    async with fake_async_llm(logits_processors=[spy]) as llm:
        engine = engine_of(llm)
        session = engine.session()

        first = await session.turn(PROMPT, 3, extra_args={"force": [1, 2, 3]})
        second = await session.turn([3, *SUFFIX], 2, extra_args={"force": [8, 9]})

        assert [first.token_ids, second.token_ids] == [[1, 2, 3], [8, 9]]
        assert spy.seen == [(len(PROMPT), 0), (len(PROMPT) + 3 + len(SUFFIX), 0)]
        await session.end()


async def test_processors_keep_track_of_rows_that_move() -> None:
    spy = _Spy()
    async with fake_async_llm(logits_processors=[spy]) as llm:
        engine = engine_of(llm)
        wanted: list[list[int]] = [[first] * (3 + 4 * first) for first in range(6)]

        turns = await asyncio.gather(
            *(engine.request([50 + ids[0]], len(ids), extra_args={"force": ids}) for ids in wanted)
        )

        assert [turn.token_ids for turn in turns] == wanted
        assert spy.num_moved > 0


async def test_whoever_lost_its_blocks_comes_back_with_what_it_has_sampled() -> None:
    spy = _Spy()
    async with fake_async_llm(logits_processors=[spy], num_blocks=NUM_BLOCKS, **SETTINGS) as llm:
        engine = engine_of(llm)
        wanted = [[first] * 100 for first in range(3)]

        turns: list[Any] = await asyncio.gather(
            *(engine.request([50 + i] * 90, 100, extra_args={"force": wanted[i]}) for i in range(3))
        )

        assert [turn.token_ids for turn in turns] == wanted
        assert any(num_sampled for _, num_sampled in spy.seen)


async def test_blocks_that_are_needed_are_those_that_were_let_go_first(engine: Engine) -> None:
    for first in (60, 61, 62):
        await engine.request([first] * 100, 20)

    latest = await engine.request([62] * 100, 1)
    oldest = await engine.request([60] * 100, 1)

    assert latest.num_cached_tokens == 96
    assert oldest.num_cached_tokens == 96
    await engine.request([63] * 310, 1)
    assert (await engine.request([61] * 100, 1)).num_cached_tokens == 0
