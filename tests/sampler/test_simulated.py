import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.client_events import TextFormat, TextFormatKind
from protocol.items import Message
from protocol.tools import CustomTool, FunctionTool
from sampler.cache_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from sampler.chat_template import ChatMLFormat
from sampler.conversation import Conversation
from sampler.engine import EngineError
from sampler.engines.simulated.chained_blocks import CorruptCacheError
from sampler.engines.simulated.model import (
    SMALL_KV,
    SMOLLM2_KV,
    KVFormat,
    SimulatedRunner,
    simulated_model,
)
from sampler.engines.simulated.pacer import Pacer
from sampler.engines.simulated.script import Place, Script, ScriptedTurn, Speaker
from sampler.grammar import GrammarCompiler
from sampler.kv_cache import KVCache, KVShape, PagedCache, PagedStorage
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel
from sampler.model_runner import ModelRunner, Piece
from sampler.outputs import CallDone, Output, SegmentEnded
from sampler.params import Constraint, SamplingParams
from sampler.run import StopReason
from sampler.sampling import Certain, sample
from sampler.suspension_policy import Mode
from sampler.swap import SwapStore
from tests.sampler import runs
from tests.sampler.runs import Client, ending, names_called, open_run, text_of
from tests.sampler.smollm2 import END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE, smollm2_tokenizer
from tests.tiny_model import WEATHER

NOTE = CustomTool("note", "Takes text")
OSLO = '{"city": "Oslo"}'
TALK = Script((ScriptedTurn(num_words=200),))
FORMATS = {"small": SMALL_KV, "SmolLM2": SMOLLM2_KV}

every_format = pytest.mark.parametrize("kv", FORMATS.values(), ids=FORMATS)


def runner_of(
    script: Script = TALK,
    kv: KVFormat = SMALL_KV,
    num_blocks: int = 64,
    pacer: Pacer | None = None,
) -> SimulatedRunner:
    speaker = Speaker(smollm2_tokenizer(), script, header(), IM_END)
    storage = PagedStorage(BlockPool(num_blocks), kv.shape, kv.dtype)
    return SimulatedRunner(
        speaker, storage, pacer or Pacer(None, None), vocab_size=VOCAB_SIZE, max_context=8192
    )


@cache
def header() -> tuple[int, ...]:
    return (IM_START, *smollm2_tokenizer().encode_text("assistant\n"))


def prompt(text: str = "the quick brown fox " * 12) -> list[int]:
    return [IM_START, *smollm2_tokenizer().encode_text(f"user\n{text}"), IM_END, *header()]


def tell(runner: ModelRunner, cache: KVCache, token_ids: Sequence[int]) -> int:
    """Return what is said after ``token_ids``."""
    [certain] = runner.forward([Piece(token_ids, cache)])
    assert isinstance(certain, Certain)
    return certain.token_id


def listen(runner: ModelRunner, cache: KVCache, token_id: int, num_tokens: int = 24) -> list[int]:
    """Return what is said after ``token_id``, and after each of the tokens that follow."""
    said: list[int] = []
    for _ in range(num_tokens):
        token_id = tell(runner, cache, [token_id])
        said.append(token_id)
    return said


def answer(runner: ModelRunner, token_ids: Sequence[int], num_tokens: int = 24) -> list[int]:
    """Return what is said after ``token_ids`` in a new cache."""
    cache = runner.new_cache()
    first = tell(runner, cache, token_ids)
    return [first, *listen(runner, cache, first, num_tokens - 1)]


def say(token_ids: Sequence[int]) -> str:
    return b"".join(map(smollm2_tokenizer().token_bytes, token_ids)).decode()


# --- What it says depends on the tokens of its context, and on nothing else -----------------------


def test_it_says_ordinary_words() -> None:
    said = say(answer(runner_of(), prompt()))
    assert len(said.split()) == 24
    assert said.replace(" ", "").isalpha()


def test_it_says_something_else_where_one_token_of_the_context_is_another() -> None:
    runner = runner_of()
    other = prompt()
    other[3] += 1
    assert answer(runner, prompt()) != answer(runner, other)
    assert answer(runner, prompt()) == answer(runner_of(), prompt())


@every_format
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 40])
def test_chunks_make_no_difference(kv: KVFormat, size: int) -> None:
    runner = runner_of(kv=kv)
    cache = runner.new_cache()
    ids = prompt()
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    for chunk in chunks[:-1]:
        [nothing] = runner.forward([Piece(chunk, cache, wants_logits=False)])
        assert nothing is None
    first = tell(runner, cache, chunks[-1])
    assert [first, *listen(runner, cache, first, 23)] == answer(runner, ids)
    assert runner.counters.tokens_forwarded == 2 * (len(ids) + 23)


def test_company_makes_no_difference() -> None:
    runner = runner_of()
    prompts = [prompt("the fox " * length) for length in (1, 30, 8)]
    caches = [runner.new_cache() for _ in prompts]
    together: list[list[int]] = [[] for _ in prompts]
    pieces = [Piece(*piece) for piece in zip(prompts, caches, strict=True)]
    for _ in range(20):
        for said, certain in zip(together, runner.forward(pieces), strict=True):
            assert certain is not None
            said.append(certain.token_id)
        pieces = [Piece([said[-1]], cache) for said, cache in zip(together, caches, strict=True)]
    assert runner.counters.forward_passes == 20
    assert together == [answer(runner, ids, 20) for ids in prompts]


def test_nothing_is_no_step() -> None:
    runner = runner_of()
    assert runner.forward([]) == []
    assert runner.counters.forward_passes == 0


@every_format
def test_a_fork_goes_on_as_its_parent_does_and_neither_disturbs_the_other(kv: KVFormat) -> None:
    runner = runner_of(kv=kv)
    parent = runner.new_cache()
    first = tell(runner, parent, prompt())
    fork = parent.fork(parent.num_tokens)
    assert fork is not None
    assert listen(runner, fork, first) == answer(runner, prompt(), 25)[1:]
    other = listen(runner, parent, 99)
    assert other == answer(runner, [*prompt(), 99])
    assert fork.num_blocks == parent.num_blocks
    assert fork.num_own_blocks < fork.num_blocks


@every_format
def test_what_was_swapped_out_goes_on_as_if_it_had_not_been(kv: KVFormat, tmp_path: Path) -> None:
    runner = runner_of(kv=kv)
    cache, other = runner.new_cache(), runner.new_cache()
    first = tell(runner, cache, prompt())
    store = SwapStore(tmp_path)
    cache.swap_out(store)
    assert store.num_bytes >= len(prompt()) * kv.block_bytes // BLOCK_SIZE
    tell(runner, other, [5] * 500)  # where it was
    cache.swap_in()
    assert listen(runner, cache, first) == answer(runner, prompt(), 25)[1:]
    store.close()


def test_what_was_discarded_comes_back() -> None:
    runner = runner_of(Script((ScriptedTurn(3, "and now a text"),)))
    cache = runner.new_cache()
    first = tell(runner, cache, prompt())
    said = listen(runner, cache, first, 4)
    cache.drop()
    [last, *_] = listen(runner, cache, tell(runner, cache, [*prompt(), first, *said[:-1]]), 1)
    assert [*said, last] == answer(runner, prompt(), 6)[1:]


def test_what_was_cut_back_goes_on_from_there() -> None:
    runner = runner_of()
    cache = runner.new_cache()
    first = tell(runner, cache, prompt())
    listen(runner, cache, first)
    cache.truncate(len(prompt()))
    assert listen(runner, cache, first) == answer(runner, prompt(), 25)[1:]


def test_a_prefix_is_found_by_those_who_know_the_salt() -> None:
    runner = runner_of()
    cache = runner.new_cache()
    tell(runner, cache, prompt())
    runner.publish("a", prompt(), cache)
    assert runner.find_prefix("b", prompt()) is None
    found = runner.find_prefix("a", [*prompt(), 99])
    assert found is not None
    assert found.num_tokens == len(prompt()) // BLOCK_SIZE * BLOCK_SIZE
    rest = [*prompt()[found.num_tokens :], 99]
    assert tell(runner, found, rest) == answer(runner, [*prompt(), 99], 1)[0]


def test_nothing_changes_where_there_is_no_room() -> None:
    runner = runner_of(num_blocks=8)
    cache, other = runner.new_cache(), runner.new_cache()
    first = tell(runner, cache, prompt())
    with pytest.raises(OutOfBlocksError):
        runner.forward([Piece([first], cache), Piece([5] * 100, other)])
    assert cache.num_tokens == len(prompt())
    assert other.num_tokens == 0
    assert listen(runner, cache, first) == answer(runner_of(), prompt(), 25)[1:]


# --- A cache that is not what was written is noticed ----------------------------------------------


def words_of(cache: PagedCache) -> np.ndarray:
    """Return the memory of all blocks: ``(blocks, positions, words)``."""
    storage = cache.storage
    words = storage.tensor.view(-1).view(torch.uint8).numpy().view(np.uint64)
    return words.reshape(storage.pool.num_blocks, BLOCK_SIZE, -1)


def flip_first_word(cache: PagedCache) -> None:
    words_of(cache)[cache.table.blocks[1], 3, 0] ^= np.uint64(1)


def flip_token(cache: PagedCache) -> None:
    words_of(cache)[cache.table.blocks[1], 3, 2] ^= np.uint64(1)


def exchange_blocks(cache: PagedCache) -> None:
    blocks = cache.table.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def lose_a_block(cache: PagedCache) -> None:
    words_of(cache)[cache.table.blocks[0]] = 0


def keep_an_old_tail(cache: PagedCache) -> None:
    blocks = cache.table.blocks
    cache.storage.copy_block(blocks[0], blocks[-1])


DAMAGES = [flip_first_word, flip_token, exchange_blocks, lose_a_block, keep_an_old_tail]


@every_format
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_before_a_prompt_is_read(
    kv: KVFormat, damage: Callable[[PagedCache], None]
) -> None:
    runner = runner_of(kv=kv)
    cache = runner.new_cache()
    tell(runner, cache, prompt())
    damage(cache)
    with pytest.raises(CorruptCacheError, match="at position"):
        tell(runner, cache, [8, 9])
    assert cache.is_broken
    assert cache.num_tokens == len(prompt())
    cache.drop()
    assert tell(runner, cache, prompt()) == answer(runner, prompt(), 1)[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_sooner_or_later_while_it_speaks(
    damage: Callable[[PagedCache], None],
) -> None:
    runner = runner_of()
    cache = runner.new_cache()
    tell(runner, cache, prompt())
    damage(cache)
    with pytest.raises(CorruptCacheError):
        listen(runner, cache, 5, 600)


def test_damage_anywhere_in_the_memory_of_a_model_is_noticed() -> None:
    runner = runner_of(kv=SMOLLM2_KV)
    cache = runner.new_cache()
    tell(runner, cache, prompt())
    cache.storage.tensor[cache.table.blocks[0], 15:] = 0  # half the layers of a block
    with pytest.raises(CorruptCacheError):
        tell(runner, cache, [8, 9])
    cache.drop()
    tell(runner, cache, prompt())
    num_filled = len(prompt()) % BLOCK_SIZE
    words_of(cache)[cache.table.blocks[-1], num_filled - 1, 4:] += np.uint64(1)
    with pytest.raises(CorruptCacheError):
        tell(runner, cache, [8])


def test_every_byte_of_a_position_is_written() -> None:
    runner = runner_of(kv=SMOLLM2_KV)
    cache = runner.new_cache()
    words_of(cache)[:] = 0
    tell(runner, cache, prompt())
    filled = words_of(cache)[cache.table.blocks[:-1]]
    assert np.count_nonzero(filled) > 0.999 * filled.size
    assert len(np.unique(filled)) > 0.999 * filled.size


def test_the_others_of_a_step_are_whole_where_one_is_damaged() -> None:
    runner = runner_of()
    one, other = runner.new_cache(), runner.new_cache()
    first = tell(runner, one, prompt())
    tell(runner, other, prompt())
    flip_first_word(other)
    with pytest.raises(CorruptCacheError):
        runner.forward([Piece([first, 7], one), Piece([5, 6], other)])
    assert other.is_broken
    assert not one.is_broken
    one.truncate(len(prompt()))
    assert listen(runner, one, first) == answer(runner, prompt(), 25)[1:]


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(KVFormat(KVShape(1, 1, 3), torch.float32), id="too small"),
        pytest.param(KVFormat(KVShape(1, 1, 9), torch.bfloat16), id="no whole words"),
    ],
)
def test_a_cache_has_room_for_what_is_kept(kv: KVFormat) -> None:
    with pytest.raises(AssertionError):
        runner_of(kv=kv)


# --- Scripts --------------------------------------------------------------------------------------


def speak(script: Script, turn: int = 0) -> str:
    """Return what is said in the ``turn``th turn of a conversation, up to its end."""
    runner = runner_of(script)
    said = answer(runner, prompt() + prompt() * turn, 100)
    assert IM_END in said
    return say(said[: said.index(IM_END)])


def test_a_turn_is_words_and_then_text() -> None:
    text = ' "é" {"a": 1}\n\n 2024 <|im_end|> ☃'
    said = speak(Script((ScriptedTurn(5, text),)))
    assert said.endswith(text)
    assert len(said.removesuffix(text).split()) == 5


def test_turns_follow_one_another_and_begin_anew() -> None:
    script = Script((ScriptedTurn(0, "one"), ScriptedTurn(0, "two"), ScriptedTurn(4)))
    assert [speak(script, turn) for turn in (0, 1, 3, 4)] == ["one", "two", "one", "two"]
    assert len(speak(script, 2).split()) == 4


def test_an_empty_turn_ends_at_once_and_goes_on_ending() -> None:
    assert answer(runner_of(Script((ScriptedTurn(),))), prompt(), 3) == [IM_END] * 3


def test_a_script_needs_a_turn() -> None:
    with pytest.raises(ValueError, match="one turn"):
        Script(())


def test_words_are_said_before_the_assistant_has_a_turn() -> None:
    script = Script((ScriptedTurn(0, "text"),))
    assert say(answer(runner_of(script), [9, 8, 7], 3)).replace(" ", "").isalpha()


def test_a_header_is_recognised_only_whole() -> None:
    start, middle, *rest = header()
    script = Script((ScriptedTurn(0, "text"),))
    for almost in ([start, middle], [start, 9, *rest], [middle, *rest], [start, middle, start]):
        assert say(answer(runner_of(script), almost, 1)) != "text"
    assert say(answer(runner_of(script), [start, middle, *header()], 1)) == "text"


def test_what_a_grammar_puts_in_between_does_not_use_up_the_text() -> None:
    runner = runner_of(Script((ScriptedTurn(0, "some text here"),)))
    some = smollm2_tokenizer().encode_text("some")
    brace = smollm2_tokenizer().encode_text("{")
    assert say(answer(runner, [*prompt(), *brace], 3)) == "some text here"
    assert say(answer(runner, [*prompt(), *some, *brace], 2)) == " text here"


def test_the_text_goes_on_inside_a_token() -> None:
    runner = runner_of(Script((ScriptedTurn(0, "some text here"),)))
    assert say(answer(runner, [*prompt(), *smollm2_tokenizer().encode_text("so")], 3)) == (
        "me text here"
    )


@pytest.mark.parametrize("place", [Place(), Place(3, 2, 1), Place(9000, 200, 4_000_000_000)])
def test_a_place_fits_a_word(place: Place) -> None:
    assert Place.unpack(place.pack()) == place
    assert place.pack() < 1 << 64


def test_the_logits_are_largest_at_what_is_certain() -> None:
    runner = runner_of(Script((ScriptedTurn(1, "text"),)))
    cache = runner.new_cache()
    token_ids = prompt()
    for _ in range(4):
        [certain] = runner.forward([Piece(token_ids, cache)])
        assert certain is not None
        logits = certain.work_out()
        assert logits.shape == (VOCAB_SIZE,)
        assert logits.dtype == torch.float32
        assert int(logits.argmax()) == certain.token_id
        token_ids = [certain.token_id]
    assert token_ids == [IM_END]


# --- Logits that are certain ----------------------------------------------------------------------


def unknown() -> torch.Tensor:
    raise AssertionError("nobody needs to know the logits")


def test_a_certain_token_is_sampled_without_its_logits() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.5, presence_penalty=2, frequency_penalty=2)
    assert sample(Certain(7, unknown), params, 0, counts={7: 50}).token_id == 7
    mask = np.array([False] * 7 + [True])
    assert sample(Certain(7, unknown), params, 0, mask).token_id == 7


def test_its_logits_are_worked_out_where_a_mask_forbids_it() -> None:
    certain = Certain(1, lambda: torch.tensor([0.0, 1e6, 500.0]))
    params = SamplingParams(temperature=1)
    assert sample(certain, params, 0, np.array([True, False, True])).token_id == 2


def test_its_logits_are_worked_out_where_logprobs_are_wanted() -> None:
    certain = Certain(1, lambda: torch.tensor([0.0, 1e6, 500.0]))
    sampled = sample(certain, SamplingParams(top_logprobs=2), 0)
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == 0
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1, 2]


def test_what_a_matcher_allows_is_what_its_mask_does() -> None:
    tokenizer = smollm2_tokenizer()
    matcher = GrammarCompiler(tokenizer, 64).matcher(Constraint((WEATHER, NOTE)))
    assert matcher is not None
    text = (
        f'Well: <tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "note"}\nWell.\n</tool_call>'
    )
    token_ids = tokenizer.encode_text(text)
    for token_id in [*token_ids, IM_END]:
        mask = matcher.mask()
        for other in (*token_ids, IM_START, IM_END, END_OF_TEXT):
            # It need not know that one of several spellings is the only one to be allowed.
            assert matcher.allows(other) >= mask[other]
        assert matcher.allows(token_id)
        matcher.accept(token_id)


# --- Pace -----------------------------------------------------------------------------------------


@dataclass
class Clock:
    """A clock by which sleeps are late."""

    lateness: Iterator[float]
    now: float = 100.0
    naps: list[float] = field(default_factory=list)

    def tell(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now += seconds + next(self.lateness)


def pacer_by(clock: Clock, decode: float | None, prefill: float | None = None) -> Pacer:
    return Pacer(decode, prefill, clock.tell, clock.sleep)


def steps(
    pacer: Pacer,
    clock: Clock,
    num_steps: int,
    *,
    within: float = 0.0,
    between: float = 0.0,
    goes_on: bool = True,
) -> float:
    """Take steps, the first of which goes on from the last one if it is said to, and return how
    long they took. The host works within them and after each of them, for so many seconds."""
    start = clock.now
    for number in range(num_steps):
        pacer.begin_step(goes_on=goes_on or number > 0)
        clock.now += within
        pacer.end_step(0)
        clock.now += between
    return clock.now - start


def lateness(*seconds: float) -> Iterator[float]:
    while True:
        yield from seconds


@pytest.mark.parametrize("late", [(0.0,), (60e-6,), (100e-6, 10e-6, 8e-3), (200e-6,)])
def test_the_average_is_exact_however_late_sleeps_are(late: tuple[float, ...]) -> None:
    clock = Clock(lateness(*late))
    pacer = pacer_by(clock, 4000)
    taken = steps(pacer, clock, 4000, within=30e-6, between=30e-6, goes_on=False)
    assert 1.0 - 1e-9 <= taken - 30e-6 <= 1.0 + 30e-6 + max(late) + 1e-9


def test_a_step_takes_as_long_as_what_takes_longest() -> None:
    clock = Clock(lateness(0.0))
    pacer = pacer_by(clock, 100, 1000)
    for num_prefilled, seconds in ((0, 0.01), (1, 0.01), (10, 0.01), (50, 0.05)):
        start = clock.now
        pacer.begin_step(goes_on=False)
        pacer.end_step(num_prefilled)
        assert clock.now - start == pytest.approx(seconds)


def test_a_prompt_takes_its_time_where_decoding_takes_none() -> None:
    clock = Clock(lateness(0.0))
    pacer = pacer_by(clock, None, 1000)
    assert steps(pacer, clock, 10, goes_on=False) == 0
    pacer.begin_step(goes_on=False)
    pacer.end_step(500)
    assert clock.naps == [pytest.approx(0.5)]


@pytest.mark.parametrize("pause", [10e-6, 0.5e-3, 3.0])
def test_what_comes_after_a_pause_takes_as_long_as_ever(pause: float) -> None:
    """Or a server that takes long between two turns would be given the time back."""
    clock = Clock(lateness(60e-6))
    pacer = pacer_by(clock, 1000)
    steps(pacer, clock, 10, goes_on=False)
    clock.now += pause
    assert 0.01 <= steps(pacer, clock, 10, goes_on=False) <= 0.01 + 61e-6


def test_what_the_host_does_meanwhile_costs_nothing_as_long_as_it_fits_into_a_step() -> None:
    clock = Clock(lateness(0.0))
    taken = steps(pacer_by(clock, 1000), clock, 200, between=0.9e-3, goes_on=False)
    assert taken == pytest.approx(0.2 + 0.9e-3)


@pytest.mark.parametrize(("within", "between"), [(0.004, 0.0), (0.0, 0.004), (0.002, 0.002)])
def test_what_a_slow_host_has_lost_is_lost(within: float, between: float) -> None:
    clock = Clock(lateness(0.0))
    pacer = pacer_by(clock, 1000)
    slow = steps(pacer, clock, 200, within=within, between=between, goes_on=False)
    clock.now -= between  # after the last of them
    assert slow == pytest.approx(0.8, abs=0.005)
    assert steps(pacer, clock, 200) == pytest.approx(0.2, abs=0.002)


def test_without_rates_there_is_no_clock() -> None:
    pacer = Pacer(None, None, unknown, unknown)  # type: ignore[arg-type]
    pacer.begin_step(goes_on=False)
    pacer.end_step(100)


class NotingPacer(Pacer):
    """Notes of each step whether something goes on in it."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.going_on: list[bool] = []

    def begin_step(self, *, goes_on: bool) -> None:
        self.going_on.append(goes_on)


def test_a_step_goes_on_with_the_token_sampled_last_and_with_the_rest_of_a_prompt() -> None:
    pacer = NotingPacer()
    runner = runner_of(num_blocks=64, pacer=pacer)
    one, other = runner.new_cache(), runner.new_cache()

    runner.forward([Piece([1, 2, 3], one, wants_logits=False)])
    runner.forward([Piece([4, 5], one)])
    runner.forward([Piece([6], one)])
    runner.forward([Piece([7, 8, 9], one)])  # the last token, and what a tool returned
    runner.forward([Piece([1, 2, 3], other)])
    runner.forward([Piece([4], other), Piece([5, 6], one)])

    assert pacer.going_on == [False, True, True, False, False, True]


def num_steps_in(seconds: float, runner: ModelRunner, pieces: Callable[[], list[Piece]]) -> float:
    """Return how many steps a second are taken, whole ones only."""
    start = time.perf_counter()
    num_steps = 0
    while (now := time.perf_counter()) - start < seconds:
        runner.forward(pieces())
        num_steps += 1
    return num_steps / (now - start)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [65, 1000, 4000])
def test_eight_rows_decode_at_the_rate_that_is_wanted(rate: float) -> None:
    runner = runner_of(num_blocks=4096, pacer=Pacer(rate, None))
    caches = [runner.new_cache() for _ in range(8)]
    measured: list[float] = []
    for _ in range(4):  # others may have the processor for a while
        time.sleep(0.02)  # so that nothing is made up for
        steps_a_second = num_steps_in(0.5, runner, lambda: [Piece([5], one) for one in caches])
        measured.append(steps_a_second)
        assert steps_a_second < 1.05 * rate
        if steps_a_second > 0.95 * rate:
            return
    pytest.fail(f"{measured} steps a second")


@pytest.mark.slow
def test_prompts_are_read_at_the_rate_that_is_wanted() -> None:
    runner = runner_of(num_blocks=4096, pacer=Pacer(4000, 20_000))
    decoding = runner.new_cache()

    def pieces() -> list[Piece]:
        return [Piece([5] * 400, runner.new_cache(), wants_logits=False), Piece([6], decoding)]

    measured: list[float] = []
    for _ in range(4):
        time.sleep(0.02)  # so that nothing is made up for
        tokens_a_second = 400 * num_steps_in(0.5, runner, pieces)
        measured.append(tokens_a_second)
        assert tokens_a_second < 1.05 * 20_000
        if tokens_a_second > 0.95 * 20_000:
            return
    pytest.fail(f"{measured} tokens a second")


# --- In an engine ---------------------------------------------------------------------------------


def model_of(script: Script, kv: KVFormat = SMALL_KV, num_blocks: int = 4096) -> LoadedModel:
    tokenizer = smollm2_tokenizer()
    return LoadedModel(
        "simulated-unlimited",
        runner_of(script, kv, num_blocks),
        tokenizer,
        ChatMLFormat(tokenizer),
    )


@asynccontextmanager
async def engine_of(
    script: Script, kv: KVFormat = SMALL_KV, num_blocks: int = 4096, policy: Mode = Mode.AUTO
) -> AsyncIterator[LocalEngine]:
    with closing(LocalEngine(model_of(script, kv, num_blocks), suspend_policy=policy)) as engine:
        yield engine


CALLING = Script.of_calls(2, "get_weather", OSLO, num_words_before=3, num_words=12)


def arguments_of(outputs: Sequence[Output]) -> list[object]:
    calls = [output.call for output in outputs if isinstance(output, CallDone)]
    return [json.loads(runs.arguments_in(call)) for call in calls]


async def test_scripted_calls_are_made_and_answered() -> None:
    async with engine_of(CALLING) as engine:
        run = await open_run(engine)
        client = Client(engine, run)
        outputs = await runs.sample(engine, run, client)
    assert names_called(outputs) == ["get_weather"] * 2
    assert arguments_of(outputs) == [{"city": "Oslo"}] * 2
    assert len(text_of(outputs).split()) == 2 * 3 + 12
    assert ending(outputs).reason is StopReason.END_OF_TURN
    assert len(client.suspensions) == 2
    assert engine.counters.tokens_reforwarded == 0


@pytest.mark.parametrize("kv", [SMALL_KV, SMOLLM2_KV], ids=list(FORMATS))
@pytest.mark.parametrize("policy", [Mode.SWAP, Mode.DISCARD, Mode.PRESERVE])
async def test_no_policy_changes_what_is_said(kv: KVFormat, policy: Mode) -> None:
    async with engine_of(CALLING, kv, num_blocks=300, policy=policy) as engine:
        opened = [await open_run(engine, f"{number}: {'talk ' * 60}") for number in range(4)]
        together = await asyncio.gather(
            *(runs.sample(engine, run, Client(engine, run)) for run in opened)
        )
        counters = engine.counters
    assert (counters.swaps_in > 0) == (policy is Mode.SWAP)
    assert (counters.tokens_reforwarded > 0) == (policy is Mode.DISCARD)
    async with engine_of(CALLING) as engine:
        for number, outputs in enumerate(together):
            run = await open_run(engine, f"{number}: {'talk ' * 60}")
            alone = await runs.sample(engine, run, Client(engine, run))
            assert text_of(outputs) == text_of(alone)
            assert arguments_of(outputs) == arguments_of(alone)


BOOK = FunctionTool(
    "book",
    "Book a table",
    {
        "type": "object",
        "properties": {
            "guests": {"type": "integer", "minimum": 100},
            "kind": {"enum": ["red", "green"]},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"}},
                "required": ["name"],
            },
            "ok": {"type": "boolean"},
            "price": {"type": "number"},
        },
        "required": ["guests", "kind", "tags", "who", "ok", "price"],
    },
)
SCRIPTS = {
    "words": Script(),
    "text": Script((ScriptedTurn(0, "Hello there"),)),
    "nothing": Script((ScriptedTurn(),)),
    "another call": Script.of_calls(1, "other", '{"a": 1}'),
    "the call": Script.of_calls(1, "get_weather", OSLO),
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("tool", [WEATHER, BOOK, NOTE], ids=lambda tool: tool.name)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_a_forced_call_is_finished_whatever_the_script_says(
    script: Script, tool: FunctionTool | CustomTool, temperature: float
) -> None:
    constraint = Constraint((tool,), min_calls=1, max_calls=1)
    params = SamplingParams(temperature=temperature, max_output_tokens=1000)
    async with engine_of(script) as engine:
        for number in range(4):
            run = await open_run(
                engine, f"{number}", tools=[tool], constraint=constraint, params=params
            )
            outputs = await runs.sample(engine, run)
            assert ending(outputs).reason is StopReason.TOOL_CALLS
            assert names_called(outputs) == [tool.name]
            if script is SCRIPTS["the call"] and tool is WEATHER:
                assert arguments_of(outputs) == [{"city": "Oslo"}]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_a_final_message_in_json_is_finished_whatever_the_script_says(
    script: Script, temperature: float
) -> None:
    schema = BOOK.parameters
    text_format = TextFormat(TextFormatKind.JSON_SCHEMA, "book", schema, strict=True)
    constraint = Constraint(text_format=text_format)
    params = SamplingParams(temperature=temperature, max_output_tokens=1000)
    async with engine_of(script) as engine:
        run = await open_run(engine, tools=[], constraint=constraint, params=params)
        outputs = await runs.sample(engine, run)
    assert ending(outputs).reason is StopReason.END_OF_TURN
    assert json.loads(text_of(outputs)).keys() == {"guests", "kind", "tags", "who", "ok", "price"}


async def test_text_that_was_to_be_said_is_the_argument_of_a_forced_call() -> None:
    async with engine_of(SCRIPTS["text"]) as engine:
        run = await open_run(engine, constraint=Constraint((WEATHER,), 1, 1))
        outputs = await runs.sample(engine, run)
    [arguments] = arguments_of(outputs)
    assert isinstance(arguments, dict)
    assert "Hello there" in arguments["city"]


async def test_a_damaged_cache_fails_its_run_only() -> None:
    async with engine_of(CALLING) as engine:
        run, other = await open_run(engine, "one"), await open_run(engine, "other")
        outputs, others = engine.sample(run, Client(engine, run)), Client(engine, other)
        async for output in outputs:
            if isinstance(output, SegmentEnded):
                break
        cache = engine.snapshot(run).cache
        assert isinstance(cache, PagedCache)
        exchange_blocks(cache)
        del cache
        with pytest.raises(EngineError):
            async for _ in outputs:
                pass
        assert ending(await runs.sample(engine, other, others)).reason is StopReason.END_OF_TURN


async def test_logprobs_say_that_it_was_certain() -> None:
    async with engine_of(SCRIPTS["text"]) as engine:
        run = await open_run(
            engine, tools=[], constraint=Constraint(), params=SamplingParams(top_logprobs=2)
        )
        outputs = await runs.sample(engine, run)
    assert text_of(outputs) == "Hello there"


# --- The whole model ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_simulated_model_says_that_it_is_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = simulated_model(4000, 100_000, kv_format=SMOLLM2_KV, kv_memory=1 << 26)
    assert model.name == "simulated-4000"
    assert model.is_simulated
    assert "simulated-4000 is simulated" in caplog.text
    assert "Simulated" in repr(model.runner)
    assert model.runner.vocab_size == VOCAB_SIZE
    assert model.runner.max_context == 8192
    assert model.runner.dtype == torch.bfloat16
    assert model.runner.device.type == "cpu"
    assert model.tokenizer.stop_ids == {END_OF_TEXT, IM_END}
    assert model.tokenizer.counters is model.runner.counters
    conversation = Conversation([Message("user", "x")])
    assert model.chat_format.prompt_ids(conversation)[-3:] == list(header())[-3:]
    cache = model.runner.new_cache()
    assert isinstance(cache, PagedCache)
    assert cache.storage.tensor.nbytes <= 1 << 26
    assert SMOLLM2_KV.block_bytes == 22.5 * 1024 * BLOCK_SIZE


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        simulated_model(kv_format=SMOLLM2_KV, kv_memory=1000)


@pytest.mark.slow
@every_format
def test_what_a_token_costs_is_shown(kv: KVFormat, capsys: pytest.CaptureFixture[str]) -> None:
    runner = runner_of(kv=kv, num_blocks=120)
    caches = [runner.new_cache() for _ in range(8)]
    for one in caches:  # so that the memory is there
        tell(runner, one, [5] * 200)
        one.drop()
    token_ids, params, num_steps = [5] * 8, SamplingParams(), 200
    start = time.process_time()
    for position in range(num_steps):
        pieces = [Piece([one], cache) for one, cache in zip(token_ids, caches, strict=True)]
        logits = runner.forward(pieces)
        token_ids = [sample(row, params, position).token_id for row in logits if row]
    microseconds = (time.process_time() - start) / (8 * num_steps) * 1e6
    with capsys.disabled():
        print(f"\n{kv.shape}: {microseconds:.1f} us of CPU a token")  # noqa: T201
