"""What can be relied on in vLLM's sessions, and what cannot: claims about an engine.

Each function below is a test of the engine that it gets. The same ones are run with the fake, in
the suite, and with the real one, in ``tests/vllm``; so the fake is what it says it is.

The engine has 12 blocks of 32 tokens, 4 sequences at most, and 320 tokens at most.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

BLOCK_SIZE = 32
NUM_BLOCKS = 12
SETTINGS = {"block_size": BLOCK_SIZE, "max_num_seqs": 4, "max_model_len": 320}

PROMPT = tuple(range(40, 85))
SUFFIX = (31, 32, 33, 34)
_PATIENCE_SECONDS = 2.0


@dataclass
class Engine:
    """An engine, and how to speak to it."""

    llm: Any
    sampling_params: Callable[..., Any]
    streaming_input: Callable[[Any, Any], Any]
    delta: Any
    refusal: type[Exception]
    death: tuple[type[Exception], ...]
    prefilled: Callable[[], Awaitable[list[int]]]
    """Returns how many tokens were forwarded as prompts since it was called last, by chunk."""
    is_patient: bool = False
    """Whether it takes the engine a while to say nothing."""
    num_requests: int = 0

    def params(self, max_tokens: int, **others: Any) -> Any:
        """Return those of a turn of so many greedy tokens; nothing ends it but what is asked."""
        usual = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return self.sampling_params(
            **{**usual, "max_tokens": max_tokens, "output_kind": self.delta, **others}
        )

    def request_id(self) -> str:
        """Return a new one."""
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def session(self, **others: Any) -> "Session":
        """Return a new session, which starts with its first turn."""
        return Session(self, self.params(1, **others))

    async def request(self, token_ids: Sequence[int], num_tokens: int, **others: Any) -> "Turn":
        """Sample one turn, of all of a context, in a request of its own."""
        params = self.params(num_tokens, **others)
        outputs = self.llm.generate(_prompt(token_ids), params, self.request_id())
        return await _turn(outputs)

    async def is_stuck(self, task: asyncio.Task[Any]) -> bool:
        """Tell whether ``task`` is still not done when whatever could move has moved."""
        await asyncio.wait([task], timeout=_PATIENCE_SECONDS if self.is_patient else 0.05)
        return not task.done()


@dataclass(frozen=True)
class Turn:
    """What a turn gave."""

    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None
    num_cached_tokens: int | None
    logprobs: list[dict[int, Any]]
    is_last: bool


class Session:
    """A session of an engine."""

    def __init__(self, engine: Engine, params: Any) -> None:
        self._engine = engine
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()
        self.request_id = engine.request_id()
        self.outputs = engine.llm.generate(self._inputs(), params, self.request_id)
        """What is sampled: an async generator."""

    async def turn(self, token_ids: Sequence[int], max_tokens: int = 12, **others: Any) -> Turn:
        """Append ``token_ids`` and return what is sampled after them."""
        self.send(token_ids, max_tokens, **others)
        return await self.rest()

    def send(self, token_ids: Sequence[int], max_tokens: int = 12, **others: Any) -> None:
        """Append ``token_ids``."""
        params = self._engine.params(max_tokens, **others)
        self._chunks.put_nowait(self._engine.streaming_input(_prompt(token_ids), params))

    async def rest(self) -> Turn:
        """Return what is sampled to the end of the turn."""
        return await _turn(self.outputs)

    async def end(self) -> None:
        """End the session between two turns."""
        self._chunks.put_nowait(None)
        rest = [output async for output in self.outputs]
        assert rest == [], rest

    async def _inputs(self) -> AsyncGenerator[Any, None]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk


def _prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(token_ids)}


async def _turn(outputs: AsyncGenerator[Any, None]) -> Turn:
    token_ids: list[int] = []
    logprobs: list[dict[int, Any]] = []
    async for output in outputs:
        (completion,) = output.outputs
        token_ids += completion.token_ids
        logprobs += completion.logprobs or []
        if completion.finish_reason is not None:
            return Turn(
                token_ids,
                completion.finish_reason,
                completion.stop_reason,
                output.num_cached_tokens,
                logprobs,
                output.finished,
            )
    raise AssertionError("the turn has no end")


# --- The context ---------------------------------------------------------------------------------


async def resumed_with_its_last_token_it_says_what_a_request_with_the_history_says(
    engine: Engine,
) -> None:
    session = engine.session()
    log = list(PROMPT)
    for _ in range(3):
        chunk = [*log[-1:], *SUFFIX] if len(log) > len(PROMPT) else log
        log += SUFFIX if len(log) > len(PROMPT) else ()
        turn = await session.turn(chunk)

        assert turn.token_ids == (await engine.request(log, 12)).token_ids
        assert not turn.is_last
        log += turn.token_ids
    await session.end()


async def without_its_last_token_it_goes_on_as_if_that_had_not_been_sampled(
    engine: Engine,
) -> None:
    session = engine.session()
    first = await session.turn(PROMPT)
    second = await session.turn(SUFFIX)
    await session.end()

    forgetful = [*PROMPT, *first.token_ids[:-1], *SUFFIX]
    assert second.token_ids == (await engine.request(forgetful, 12)).token_ids


async def resumed_it_forwards_the_last_token_and_the_suffix(engine: Engine) -> None:
    await engine.llm.reset_prefix_cache()
    await engine.prefilled()
    session = engine.session()
    first = await session.turn(PROMPT)
    second = await session.turn([first.token_ids[-1], *SUFFIX])
    await session.end()

    assert await engine.prefilled() == [len(PROMPT), 1 + len(SUFFIX)]
    assert second.num_cached_tokens == 0  # it is not told of later chunks


async def in_the_middle_of_a_turn_it_goes_on_from_its_last_token(engine: Engine) -> None:
    whole = await engine.request(PROMPT, 20)
    session = engine.session()
    first = await session.turn(PROMPT, 8)
    second = await session.turn(first.token_ids[-1:], 12)
    await session.end()

    assert [*first.token_ids, *second.token_ids] == whole.token_ids


# --- What ends a turn ----------------------------------------------------------------------------


async def a_turn_may_be_over_with_its_first_token(engine: Engine) -> None:
    whole = (await engine.request(PROMPT, 12)).token_ids
    session = engine.session()
    first = await session.turn(PROMPT, 6)
    empty = await session.turn(first.token_ids[-1:], stop_token_ids=[whole[6]])
    third = await session.turn([*empty.token_ids, *SUFFIX], 5)
    await session.end()

    assert (empty.token_ids, empty.finish_reason) == ([whole[6]], "stop")
    expected = await engine.request([*PROMPT, *whole[:7], *SUFFIX], 5)
    assert third.token_ids == expected.token_ids


async def the_stop_reason_may_be_that_of_an_earlier_turn(engine: Engine) -> None:
    stop = (await engine.request(PROMPT, 1)).token_ids
    session = engine.session()
    stopped = await session.turn(PROMPT, stop_token_ids=stop)
    cut = await session.turn([*stopped.token_ids, *SUFFIX], 3)
    await session.end()

    assert (cut.finish_reason, cut.stop_reason) == ("length", stop[0])


async def max_tokens_is_of_the_turn(engine: Engine) -> None:
    session = engine.session()
    turns = [await session.turn(PROMPT, 5), await session.turn(SUFFIX, 2)]
    await session.end()

    assert [len(turn.token_ids) for turn in turns] == [5, 2]
    assert {turn.finish_reason for turn in turns} == {"length"}


# --- Sampling ------------------------------------------------------------------------------------


async def the_seed_is_that_of_the_first_turn(engine: Engine) -> None:
    whole = await engine.request(PROMPT, 16, temperature=1.0, seed=7)
    session = engine.session()
    first = await session.turn(PROMPT, 8, temperature=1.0, seed=7)
    second = await session.turn(first.token_ids[-1:], 8, temperature=1.0, seed=99)
    await session.end()

    assert [*first.token_ids, *second.token_ids] == whole.token_ids


async def penalties_count_what_the_turn_sampled(engine: Engine) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
    session = engine.session()
    first = await session.turn(PROMPT, 8, **penalties)
    second = await session.turn(first.token_ids[-1:], 8, **penalties)
    await session.end()

    anew = await engine.request([*PROMPT, *first.token_ids], 8, **penalties)
    assert second.token_ids == anew.token_ids


async def each_turn_may_have_log_probabilities_if_all_have(engine: Engine) -> None:
    session = engine.session(logprobs=2)
    first = await session.turn(PROMPT, 3, logprobs=2)
    second = await session.turn([*first.token_ids[-1:], *SUFFIX], 3, logprobs=2)
    await session.end()

    for turn in (first, second):
        assert all(token in of for token, of in zip(turn.token_ids, turn.logprobs, strict=True))


# --- What is refused -----------------------------------------------------------------------------


async def stop_strings_are_refused(engine: Engine) -> None:
    session = engine.session(stop=["x"], detokenize=True)
    with pytest.raises(engine.refusal, match="stop strings"):
        await session.turn(PROMPT)


async def several_answers_are_refused(engine: Engine) -> None:
    session = engine.session(n=2, temperature=1.0)
    with pytest.raises(engine.refusal, match="n > 1"):
        await session.turn(PROMPT)


async def an_empty_chunk_is_refused_and_ends_the_session(engine: Engine) -> None:
    session = engine.session()
    await session.turn(PROMPT)
    with pytest.raises(engine.refusal, match="cannot be empty"):
        await session.turn([])

    assert [output async for output in session.outputs] == []
    assert len((await engine.request(PROMPT, 3)).token_ids) == 3


# --- Endings -------------------------------------------------------------------------------------


async def what_an_ended_session_held_is_found_by_a_request_with_its_tokens(
    engine: Engine,
) -> None:
    await engine.llm.reset_prefix_cache()
    session = engine.session()
    first = await session.turn(PROMPT, 30)
    second = await session.turn([first.token_ids[-1], *SUFFIX], 30)
    await session.end()

    log = [*PROMPT, *first.token_ids, *SUFFIX, *second.token_ids]
    found = await engine.request(log, 3)
    assert found.num_cached_tokens == (len(log) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def closed_in_the_middle_it_can_be_opened_again_earlier_with_the_same_tokens(
    engine: Engine,
) -> None:
    session = engine.session()
    session.send(PROMPT, 200)
    sampled: list[int] = []
    async for output in session.outputs:
        sampled += output.outputs[0].token_ids
        if len(sampled) >= 40:
            break
    await session.outputs.aclose()

    again = engine.session()
    turn = await again.turn([*PROMPT, *sampled[:35]], 5)
    await again.end()
    assert turn.token_ids == sampled[35:40]
    assert turn.num_cached_tokens == (len(PROMPT) + 34) // BLOCK_SIZE * BLOCK_SIZE


async def aborted_between_two_turns_it_says_so_and_is_over(engine: Engine) -> None:
    session = engine.session()
    await session.turn(PROMPT)
    await engine.llm.abort(session.request_id)
    last = await session.rest()

    assert (last.token_ids, last.finish_reason, last.is_last) == ([], "abort", True)
    assert [output async for output in session.outputs] == []


# --- Scarcity ------------------------------------------------------------------------------------


async def paused_sessions_count_against_the_sequences(engine: Engine) -> None:
    sessions = [engine.session() for _ in range(4)]
    turns = [await session.turn(PROMPT, 4) for session in sessions]
    fifth = asyncio.create_task(engine.request(PROMPT, 4))

    assert await engine.is_stuck(fifth)
    await sessions[0].turn([turns[0].token_ids[-1], *SUFFIX], 4)
    assert await engine.is_stuck(fifth)
    await sessions[1].end()
    assert len((await fifth).token_ids) == 4
    for session in (sessions[0], *sessions[2:]):
        await session.end()


async def paused_sessions_can_leave_no_room_to_resume(engine: Engine) -> None:
    async with _full_of_paused_sessions(engine) as sessions:
        resumed = [asyncio.create_task(session.turn([5] * 40, 4)) for session in sessions[:2]]

        for task in resumed:
            assert await engine.is_stuck(task)
        await sessions[2].end()
        assert [len((await task).token_ids) for task in resumed] == [4, 4]


async def paused_sessions_can_leave_no_room_for_one_that_runs(engine: Engine) -> None:
    async with _full_of_paused_sessions(engine, num_sessions=2):
        runs = asyncio.create_task(engine.request([7] * 90, 60))

        assert await engine.is_stuck(runs)
    assert len((await runs).token_ids) == 60


@asynccontextmanager
async def _full_of_paused_sessions(
    engine: Engine, num_sessions: int = 3
) -> AsyncGenerator[list[Session], None]:
    """Have sessions with a third of the memory each, between two turns."""
    await engine.llm.reset_prefix_cache()
    sessions = [engine.session() for _ in range(num_sessions)]
    for first, session in enumerate(sessions, 100):
        await session.turn([first] * 120, 4)
    try:
        yield sessions
    finally:
        for session in sessions:
            await session.outputs.aclose()


# --- Fatalities ----------------------------------------------------------------------------------


async def log_probabilities_that_the_first_turn_had_not_kill_the_engine(engine: Engine) -> None:
    bystander = engine.session()
    await bystander.turn(PROMPT)
    session = engine.session()
    await session.turn(PROMPT)
    with pytest.raises(engine.death):
        await session.turn(SUFFIX, logprobs=2)

    assert engine.llm.errored
    with pytest.raises(engine.death):
        await bystander.turn(SUFFIX)


async def a_chunk_beyond_the_longest_context_kills_the_engine(engine: Engine) -> None:
    session = engine.session()
    await session.turn([9] * 250, 4)
    with pytest.raises(engine.death):
        await session.turn([9] * 100, 4)

    assert engine.llm.errored


Claim: TypeAlias = Callable[[Engine], Awaitable[None]]


def _claims(functions: Iterable[Any]) -> list[Any]:
    return [pytest.param(function, id=function.__name__) for function in functions]


CLAIMS = _claims(
    (
        resumed_with_its_last_token_it_says_what_a_request_with_the_history_says,
        without_its_last_token_it_goes_on_as_if_that_had_not_been_sampled,
        resumed_it_forwards_the_last_token_and_the_suffix,
        in_the_middle_of_a_turn_it_goes_on_from_its_last_token,
        a_turn_may_be_over_with_its_first_token,
        the_stop_reason_may_be_that_of_an_earlier_turn,
        max_tokens_is_of_the_turn,
        the_seed_is_that_of_the_first_turn,
        penalties_count_what_the_turn_sampled,
        each_turn_may_have_log_probabilities_if_all_have,
        stop_strings_are_refused,
        several_answers_are_refused,
        an_empty_chunk_is_refused_and_ends_the_session,
        what_an_ended_session_held_is_found_by_a_request_with_its_tokens,
        closed_in_the_middle_it_can_be_opened_again_earlier_with_the_same_tokens,
        aborted_between_two_turns_it_says_so_and_is_over,
        paused_sessions_count_against_the_sequences,
        paused_sessions_can_leave_no_room_to_resume,
        paused_sessions_can_leave_no_room_for_one_that_runs,
    )
)
FATALITIES = _claims(
    (
        log_probabilities_that_the_first_turn_had_not_kill_the_engine,
        a_chunk_beyond_the_longest_context_kills_the_engine,
    )
)
