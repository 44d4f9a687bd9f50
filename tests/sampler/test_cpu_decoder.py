"""The compiled forward pass: what it computes, and that nothing around a row changes a bit of it.

All blocks hold NaN until they are written to, in every test.
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from sampler import cpu_kernels
from sampler.cache_pool import BLOCK_SIZE, OutOfBlocksError
from sampler.cpu_decoder import CPUDecoder, covers
from sampler.cpu_kernels import CHUNK_TOKENS
from sampler.decoder_weights import DecoderWeights
from sampler.kv_cache import KVCache, PagedCache
from sampler.model_runner import Piece
from sampler.simd import GROUP, processor_has
from sampler.swap import SwapStore
from tests.sampler import on_haswell
from tests.sampler.cpu_decoders import (
    WAYS,
    Way,
    covered_model,
    new_decoder,
    new_storage,
    quantise,
    with_rounded_cache,
)
from tests.sampler.decoders import DECODERS, known_weights
from tests.sampler.families import IDS, TOLERANCE, distance, family, without_cache


def forward(decoder: CPUDecoder, token_ids: Sequence[int], cache: KVCache) -> Tensor:
    [logits] = decoder.forward([Piece(token_ids, cache)])
    assert logits is not None
    return logits


def fork(cache: KVCache, num_tokens: int) -> KVCache:
    forked = cache.fork(num_tokens)
    assert forked is not None
    return forked


# --- What it computes ----------------------------------------------------------------------------

# Queries to a key, and keys.
GROUPS = [(1, 3), (3, 2), (4, 1), (8, 1), (12, 1)]
HEADS: dict[str, dict[str, Any]] = {
    f"{group} queries to a key": {
        "num_attention_heads": group * heads,
        "num_key_value_heads": heads,
        "hidden_size": 96 if group % 3 == 0 or heads == 3 else 32,
    }
    for group, heads in GROUPS
}
SIZES: dict[str, dict[str, Any]] = {
    **HEADS,
    "heads of 64": {"head_dim": 64},
    "heads of 96": {"head_dim": 96},
    "heads that make up the width": {"head_dim": 32, "hidden_size": 128},
    "an MLP of five tiles": {"intermediate_size": 160},
    "a vocabulary of no whole tile": {"vocab_size": 77},
    "a vocabulary of one more than two tiles": {"vocab_size": 65},
    "one layer": {"num_hidden_layers": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in DECODERS},
    "SmolLM": ("SmolLM", {"hidden_size": 288}),
    "Mistral, wide window": ("Mistral, wide window", {"sliding_window": 1024}),
    "Llama, tied, of no whole tile": ("Llama, tied", {"vocab_size": 77}),
    **{name: ("Llama", options) for name, options in SIZES.items()},
}


@pytest.mark.parametrize(("name", "options"), MODELS.values(), ids=MODELS.keys())
def test_logits_are_those_of_the_models_own_class(name: str, options: dict[str, Any]) -> None:
    model = covered_model(name, **options)
    decoder = new_decoder(known_weights(model))
    cache = decoder.new_cache()

    for start, stop in [(0, 21), (21, 22), (22, 23), (23, 40)]:
        logits = forward(decoder, IDS[start:stop], cache)

        expected = without_cache(model, IDS[:stop])
        assert logits.shape == expected.shape
        assert logits.dtype is torch.float32
        assert distance(logits, expected) < TOLERANCE
    assert cache.num_tokens == 40


def long_ids(seed: int, length: int = 560) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (length,), generator=generator).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Llama 3", "Llama, YaRN", "Qwen 3"])
def test_logits_are_those_of_the_models_own_class_in_a_long_context(name: str) -> None:
    model = covered_model(name)
    decoder = new_decoder(known_weights(model))
    cache, token_ids = decoder.new_cache(), long_ids(0)

    for start, stop in [(0, 300), (300, 511), (511, 512), (512, 513), (513, 514), (514, 560)]:
        logits = forward(decoder, token_ids[start:stop], cache)

        assert distance(logits, without_cache(model, token_ids[:stop])) < TOLERANCE


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what is saved of a model, and leave its rotary frequencies, as loading it does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def round_inputs(model: PreTrainedModel, form: str) -> None:
    """Have the inputs of all products of ``model`` rounded, as those of pairs are."""

    def rounded(_: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        [values] = inputs
        if form == "bfloat16":
            return (values.bfloat16().float(),)
        groups = values.reshape(*values.shape[:-1], -1, GROUP)
        scales = groups.abs().amax(-1, keepdim=True) / 32767
        return (((groups / scales).round() * scales).reshape(values.shape),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Qwen 2", "Qwen 3"])
def test_logits_are_those_of_the_numbers_that_are_kept(name: str, way: Way) -> None:
    form, pairs, kv_dtype = way
    model = covered_model(name, vocab_size=77, intermediate_size=160)
    if form == "bfloat16":
        cast(model, torch.bfloat16)
    weights = known_weights(model)
    decoder = new_decoder(weights, form, multiplies_pairs=pairs, kv_dtype=kv_dtype)
    if form == "bfloat16":
        cast(model, torch.float32)
    elif form != "float32":
        quantise(weights, form)
    unrounded = {stop: with_rounded_cache(model, IDS[:stop], kv_dtype) for stop in (21, 22, 23, 40)}
    if pairs:
        round_inputs(model, form)
    cache = decoder.new_cache()

    for start, stop in [(0, 21), (21, 22), (22, 23), (23, 40)]:
        logits = forward(decoder, IDS[start:stop], cache)

        # Keys and values that lie between two numbers of the format may be rounded to either.
        exact = without_cache(model, IDS[:stop])
        rounded = with_rounded_cache(model, IDS[:stop], kv_dtype)
        assert distance(logits, rounded) < (5e-3 if kv_dtype is torch.int8 else 1e-3)
        assert distance(logits, rounded) < distance(logits, exact)
        assert not pairs or distance(logits, rounded) < distance(logits, unrounded[stop])


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way.kv_dtype is torch.int8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_each_group_of_a_wide_head_has_scales_of_its_own(head_dim: int, way: Way) -> None:
    model = covered_model(head_dim=head_dim)
    weights = known_weights(model)
    decoder = new_decoder(weights, way.form, multiplies_pairs=way.pairs, kv_dtype=way.kv_dtype)
    if way.form != "float32":
        quantise(weights, way.form)
    if way.pairs:
        round_inputs(model, way.form)
    cache = decoder.new_cache()

    for start, stop in [(0, 21), (21, 22), (22, 23), (23, 40)]:
        logits = forward(decoder, IDS[start:stop], cache)

        expected = with_rounded_cache(model, IDS[:stop], way.kv_dtype)
        assert distance(logits, expected) < 5e-3
        assert distance(logits, expected) < distance(logits, without_cache(model, IDS[:stop]))


@pytest.mark.slow
@pytest.mark.skipif(not processor_has("avx2"), reason="needs a processor that has AVX2")
def test_all_of_it_holds_where_vectors_are_shorter_and_nothing_in_it_can_raise(
    tmp_path: Path,
) -> None:
    # Code that was found compiled cannot be looked at, so it is made anew.
    cache = {"SUSPENDED_SAMPLING_CACHE": str(tmp_path)}

    ended = subprocess.run(
        [sys.executable, "-m", on_haswell.__name__],
        env={**os.environ, **on_haswell.ENVIRONMENT, **cache},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr


# --- What it does not cover ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"head_dim": 16}, {"head_dim": 48}, {"hidden_size": 48}, {"intermediate_size": 80}],
    ids=str,
)
def test_a_network_that_is_not_made_of_whole_tiles_is_not_covered(options: dict[str, Any]) -> None:
    weights = known_weights(family("Llama", {"head_dim": 32, **options}))

    assert not covers(weights)


def test_weights_elsewhere_are_not_covered() -> None:
    weights = known_weights(covered_model())

    assert covers(weights)
    assert not covers(replace(weights, embed=weights.embed.to("meta")))


# --- To the bit ----------------------------------------------------------------------------------

NUM_STREAMS = 3
STREAMS = [long_ids(seed + 1) for seed in range(NUM_STREAMS)]
EDGES = [
    edge + offset for edge in (BLOCK_SIZE, CHUNK_TOKENS, 2 * CHUNK_TOKENS) for offset in (-1, 0, 1)
]


@dataclass(frozen=True)
class Subject:
    """One model in one format, and what it says after every token of the streams."""

    weights: DecoderWeights
    way: Way
    decoders: dict[int, CPUDecoder]
    """By the number of their threads; caches are not to be mixed."""
    said: list[list[Tensor]]
    """For each stream the logits after its first token, its second and so on."""

    @property
    def decoder(self) -> CPUDecoder:
        return self.decoders[1]

    def holding(self, stream: int, num_tokens: int, num_threads: int = 1) -> KVCache:
        """Return a cache that holds the beginning of a stream."""
        cache = self.decoders[num_threads].new_cache()
        if num_tokens:
            forward(self.decoders[num_threads], STREAMS[stream][:num_tokens], cache)
        return cache

    def agrees(self, logits: Tensor | None, stream: int, num_tokens: int) -> bool:
        """Tell whether ``logits`` are what is said after ``num_tokens``, to the bit."""
        return logits is not None and torch.equal(logits, self.said[stream][num_tokens - 1])


def token_by_token(decoder: CPUDecoder, token_ids: Sequence[int]) -> list[Tensor]:
    cache = decoder.new_cache()
    return [forward(decoder, [token_id], cache).clone() for token_id in token_ids]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    # Three queries to a key: the rows of a tile are then of several tokens.
    options = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 77}
    weights = known_weights(covered_model("Qwen 3", **options))
    form, pairs, kv_dtype = request.param
    decoders = {
        number: new_decoder(weights, form, 512, number, multiplies_pairs=pairs, kv_dtype=kv_dtype)
        for number in (1, 2, 3)
    }
    said = [token_by_token(decoders[1], token_ids) for token_ids in STREAMS]
    assert all(logits.isfinite().all() for stream in said for logits in stream)
    return Subject(weights, request.param, decoders, said)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, *EDGES, 560])
def test_one_pass_says_what_tokens_one_by_one_do(subject: Subject, num_tokens: int) -> None:
    logits = forward(subject.decoder, STREAMS[0][:num_tokens], subject.decoder.new_cache())

    assert subject.agrees(logits, 0, num_tokens)


@pytest.mark.parametrize("start", EDGES)
def test_pieces_may_begin_at_any_position(subject: Subject, start: int) -> None:
    for length in (1, 2, 8, 9, 40):
        cache = subject.holding(0, start)
        logits = forward(subject.decoder, STREAMS[0][start : start + length], cache)
        following = forward(subject.decoder, [STREAMS[0][start + length]], cache)

        assert subject.agrees(logits, 0, start + length)
        assert subject.agrees(following, 0, start + length + 1)


cuts = st.sets(st.integers(1, 559), max_size=8).map(sorted)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(stops=cuts, num_threads=st.sampled_from([1, 2, 3]))
def test_it_does_not_matter_how_a_sequence_is_cut(
    subject: Subject, stops: list[int], num_threads: int
) -> None:
    decoder = subject.decoders[num_threads]
    cache = decoder.new_cache()

    for start, stop in zip([0, *stops], [*stops, 560], strict=True):
        assert subject.agrees(forward(decoder, STREAMS[0][start:stop], cache), 0, stop)


@dataclass(frozen=True)
class Row:
    """A piece of a stream."""

    stream: int
    start: int
    length: int
    wants_logits: bool


rows = st.builds(
    Row,
    stream=st.integers(0, NUM_STREAMS - 1),
    start=st.one_of(st.integers(0, 500), st.sampled_from([0, *EDGES])),
    length=st.one_of(st.just(1), st.integers(1, 40)),
    wants_logits=st.booleans(),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(batch=st.lists(rows, min_size=1, max_size=12), num_threads=st.sampled_from([1, 2, 3]))
def test_it_does_not_matter_who_else_is_in_the_batch(
    subject: Subject, batch: list[Row], num_threads: int
) -> None:
    caches = [subject.holding(row.stream, row.start, num_threads) for row in batch]
    stops = [row.start + row.length for row in batch]
    pieces = [
        Piece(STREAMS[row.stream][row.start : stop], cache, row.wants_logits)
        for row, stop, cache in zip(batch, stops, caches, strict=True)
    ]

    logits = subject.decoders[num_threads].forward(pieces)

    for row, stop, cache, said in zip(batch, stops, caches, logits, strict=True):
        assert cache.num_tokens == stop
        assert subject.agrees(said, row.stream, stop) if row.wants_logits else said is None
    following = [STREAMS[row.stream][stop] for row, stop in zip(batch, stops, strict=True)]
    again = subject.decoders[num_threads].forward(
        [Piece([token_id], cache) for token_id, cache in zip(following, caches, strict=True)]
    )
    for row, stop, said in zip(batch, stops, again, strict=True):
        assert subject.agrees(said, row.stream, stop + 1)


def test_more_rows_than_a_unit_takes_change_nothing(subject: Subject) -> None:
    decoder = subject.decoders[3]
    lengths = [*range(1, 60), 130]
    caches = [subject.holding(index % NUM_STREAMS, n, 3) for index, n in enumerate(lengths)]

    pieces = [
        Piece([STREAMS[index % NUM_STREAMS][n]], cache)
        for index, (n, cache) in enumerate(zip(lengths, caches, strict=True))
    ]
    prefilled = decoder.new_cache()
    logits = decoder.forward([*pieces, Piece(STREAMS[1][:200], prefilled)])

    for index, n in enumerate(lengths):
        assert subject.agrees(logits[index], index % NUM_STREAMS, n + 1)
    assert subject.agrees(logits[-1], 1, 200)


@pytest.mark.parametrize("num_tokens", [7, 16, 37, 255, 256, 257, 270])
def test_forks_go_on_each_by_themselves(subject: Subject, num_tokens: int) -> None:
    cache = subject.holding(0, 270)
    forked, sibling = fork(cache, num_tokens), fork(cache, num_tokens)

    other = forward(subject.decoder, STREAMS[1][:20], forked)
    on, same = subject.decoder.forward(
        [Piece([STREAMS[0][270]], cache), Piece(STREAMS[0][num_tokens:280], sibling)]
    )

    assert subject.agrees(on, 0, 271)
    assert subject.agrees(same, 0, 280)
    alone = forward(
        subject.decoder, [*STREAMS[0][:num_tokens], *STREAMS[1][:20]], subject.decoder.new_cache()
    )
    assert torch.equal(other, alone)


@pytest.mark.parametrize("num_tokens", [5, 32, 256, 259])
def test_what_was_swapped_out_comes_back(subject: Subject, num_tokens: int, tmp_path: Path) -> None:
    store = SwapStore(tmp_path)
    cache = subject.holding(0, num_tokens)

    cache.swap_out(store)
    in_its_place = subject.holding(1, 300)
    cache.swap_in()
    logits = forward(subject.decoder, STREAMS[0][num_tokens : num_tokens + 30], cache)
    store.close()

    assert subject.agrees(logits, 0, num_tokens + 30)
    assert subject.agrees(forward(subject.decoder, [STREAMS[1][300]], in_its_place), 1, 301)


@pytest.mark.parametrize("num_tokens", [0, 5, 16, 250, 256, 257])
def test_what_was_undone_leaves_nothing_behind(subject: Subject, num_tokens: int) -> None:
    cache = subject.holding(0, num_tokens)
    forward(subject.decoder, STREAMS[1][:50], cache)

    cache.truncate(num_tokens)
    logits = forward(subject.decoder, STREAMS[0][num_tokens : num_tokens + 3], cache)
    following = forward(subject.decoder, [STREAMS[0][num_tokens + 3]], cache)

    assert subject.agrees(logits, 0, num_tokens + 3)
    assert subject.agrees(following, 0, num_tokens + 4)


@pytest.mark.parametrize("num_tokens", [16, 40, 256, 300])
@pytest.mark.parametrize("num_more", [0, 1, 30])
def test_a_published_prefix_is_as_good_as_ones_own(
    subject: Subject, num_tokens: int, num_more: int
) -> None:
    decoder, salt, length = subject.decoder, object(), num_tokens + num_more
    cache = subject.holding(0, num_tokens)
    decoder.publish(salt, STREAMS[0][:num_tokens], cache)
    cache.drop()

    found = decoder.find_prefix(salt, STREAMS[0][:length])
    assert found is not None
    held = found.num_tokens
    logits = forward(decoder, STREAMS[0][held:length], found)

    # Whole blocks, and at least one token is left to be forwarded.
    assert held == min(num_tokens // BLOCK_SIZE * BLOCK_SIZE, length - 1)
    assert subject.agrees(logits, 0, length)


def test_many_start_from_one_prefix_at_once(subject: Subject) -> None:
    decoder, salt = subject.decoders[2], object()
    decoder.publish(salt, STREAMS[0][:64], subject.holding(0, 64, 2))
    found = [decoder.find_prefix(salt, STREAMS[0][:length]) for length in (64, 64, 70, 100)]

    pieces = [
        Piece(STREAMS[0][cache.num_tokens : length], cache)
        for cache, length in zip(found, (64, 64, 70, 100), strict=True)
        if cache is not None
    ]
    logits = decoder.forward(pieces)

    for said, length in zip(logits, (64, 64, 70, 100), strict=True):
        assert subject.agrees(said, 0, length)


def test_nothing_is_found_that_was_published_with_another_salt(subject: Subject) -> None:
    decoder, salt = subject.decoder, object()
    decoder.publish(salt, STREAMS[0][:40], subject.holding(0, 40))

    assert decoder.find_prefix(object(), STREAMS[0][:40]) is None
    assert decoder.find_prefix(salt, STREAMS[1][:40]) is None
    assert decoder.find_prefix(salt, STREAMS[0][:1]) is None


@pytest.mark.parametrize("garbage", [0.0, torch.inf, -torch.inf, torch.nan, 3e38])
def test_what_was_never_written_changes_nothing(subject: Subject, garbage: float) -> None:
    dtype = subject.decoder.dtype
    storage = new_storage(subject.weights, dtype, num_blocks=40)
    # In int8 it is the scales, in float16, that may be anything.
    as_numbers = storage.tensor.view(torch.float16) if dtype is torch.int8 else storage.tensor
    as_numbers.copy_(torch.tensor(garbage))
    decoder = CPUDecoder(
        subject.weights,
        storage,
        weight_format=subject.way.form,
        multiplies_pairs=subject.way.pairs,
    )
    one, other = decoder.new_cache(), decoder.new_cache()

    first = decoder.forward([Piece(STREAMS[0][:259], one), Piece(STREAMS[1][:11], other)])
    second = decoder.forward([Piece([STREAMS[0][259]], one), Piece([STREAMS[1][11]], other)])

    assert subject.agrees(first[0], 0, 259)
    assert subject.agrees(first[1], 1, 11)
    assert subject.agrees(second[0], 0, 260)
    assert subject.agrees(second[1], 1, 12)


NO_NUMBER = 1  # no stream has this token


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("before", [0, 5, 21, 255, 256, 300])
def test_what_is_no_number_stays_with_those_who_read_it(
    subject: Subject, before: int, num_threads: int
) -> None:
    embed = subject.weights.embed.clone()
    embed[NO_NUMBER] = torch.nan
    decoder = new_decoder(
        replace(subject.weights, embed=embed),
        subject.way.form,
        num_threads=num_threads,
        multiplies_pairs=subject.way.pairs,
        kv_dtype=subject.way.kv_dtype,
    )
    caches = [decoder.new_cache() for _ in range(3)]
    beginning = STREAMS[0][:before]

    pieces = [
        Piece(STREAMS[1][:70], caches[0]),
        Piece([*beginning, NO_NUMBER, *STREAMS[0][before : before + 20]], caches[1]),
        Piece(STREAMS[2][:1], caches[2]),
    ]
    first = decoder.forward(pieces)
    following = [STREAMS[1][70], STREAMS[0][0], STREAMS[2][1]]
    second = decoder.forward(
        [Piece([token_id], cache) for token_id, cache in zip(following, caches, strict=True)]
    )

    for logits in (first[1], second[1]):
        assert logits is not None
        assert logits.isnan().all()
    assert subject.agrees(first[0], 1, 70)
    assert subject.agrees(second[0], 1, 71)
    assert subject.agrees(first[2], 2, 1)
    assert subject.agrees(second[2], 2, 2)
    # Nor do the tokens before it notice.
    caches[1].truncate(before)
    again = forward(decoder, STREAMS[0][before : before + 3], caches[1])
    assert subject.agrees(again, 0, before + 3)


# --- Threads -------------------------------------------------------------------------------------


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], CPUDecoder]:
    """Return a function that makes a decoder with two helpers, who do as they are told."""
    step = cpu_kernels.step

    def new(help_out: Callable[..., None]) -> CPUDecoder:
        def played(thread: int, *arguments: Any) -> None:
            if thread == 0:
                step(thread, *arguments)
            else:
                help_out(step, thread, *arguments)

        decoder = new_decoder(known_weights(covered_model()), num_threads=3)
        monkeypatch.setattr(cpu_kernels, "step", played)
        return decoder

    return new


def expected_logits() -> list[Tensor]:
    return token_by_token(new_decoder(known_weights(covered_model())), STREAMS[0][:60])


def test_helpers_that_never_come_change_nothing(
    crew: Callable[[Callable[..., None]], CPUDecoder],
) -> None:
    expected = expected_logits()
    decoder = crew(lambda *_: None)
    cache = decoder.new_cache()

    first = forward(decoder, STREAMS[0][:59], cache)
    second = forward(decoder, STREAMS[0][59:60], cache)

    assert torch.equal(first, expected[58])
    assert torch.equal(second, expected[59])


def test_helpers_that_come_when_a_step_is_over_change_nothing(
    crew: Callable[[Callable[..., None]], CPUDecoder],
) -> None:
    expected = expected_logits()
    is_over, has_come = Event(), [Event(), Event()]

    def come_late(step: Callable[..., None], thread: int, *arguments: Any) -> None:
        is_over.wait()
        step(thread, *arguments)
        has_come[thread - 1].set()

    decoder = crew(come_late)
    cache = decoder.new_cache()

    first = forward(decoder, STREAMS[0][:59], cache)
    before = first.clone()
    is_over.set()
    for event in has_come:
        event.wait()
    second = forward(decoder, STREAMS[0][59:60], cache)

    assert torch.equal(first, before)
    assert torch.equal(first, expected[58])
    assert torch.equal(second, expected[59])


def test_helpers_that_are_steps_behind_change_nothing(
    crew: Callable[[Callable[..., None]], CPUDecoder],
) -> None:
    expected = expected_logits()
    # They take part in the first step as soon as the tenth is over, while others go on.
    tenth_is_over = Event()

    def come_late(step: Callable[..., None], thread: int, *arguments: Any) -> None:
        tenth_is_over.wait()
        step(thread, *arguments)

    decoder = crew(come_late)
    cache = decoder.new_cache()

    said = []
    for number, token_id in enumerate(STREAMS[0][:60]):
        said.append(forward(decoder, [token_id], cache))
        if number == 9:
            tenth_is_over.set()

    assert all(map(torch.equal, said, expected))


@pytest.mark.parametrize("num_tokens", [1, 2, 40, 300])
def test_helpers_may_do_all_the_work(
    subject: Subject, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, is_done = cpu_kernels.step, Event()

    def after_the_helpers(thread: int, *arguments: Any) -> None:
        if thread == 0:
            is_done.wait()
        step(thread, *arguments)
        is_done.set()

    monkeypatch.setattr(cpu_kernels, "step", after_the_helpers)
    logits = forward(subject.decoders[3], STREAMS[0][:num_tokens], subject.decoders[3].new_cache())

    assert subject.agrees(logits, 0, num_tokens)


def test_helpers_that_come_at_once_change_nothing(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, barrier = cpu_kernels.step, Barrier(3)

    def all_together(thread: int, *arguments: Any) -> None:
        barrier.wait()
        step(thread, *arguments)

    monkeypatch.setattr(cpu_kernels, "step", all_together)
    decoder = subject.decoders[3]
    one, other = decoder.new_cache(), decoder.new_cache()
    said = decoder.forward([Piece(STREAMS[0][:300], one), Piece(STREAMS[1][:70], other)])
    assert subject.agrees(said[0], 0, 300)
    assert subject.agrees(said[1], 1, 70)
    for index in range(40):
        pieces = [Piece([STREAMS[0][300 + index]], one), Piece([STREAMS[1][70 + index]], other)]
        said = decoder.forward(pieces)
        assert subject.agrees(said[0], 0, 301 + index)
        assert subject.agrees(said[1], 1, 71 + index)


def test_for_helpers_that_are_held_up_only_the_newest_step_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, may_come = cpu_kernels.step, Event()
    steps: list[ref[Any]] = []

    def played(thread: int, *arguments: Any) -> None:
        if thread == 0:
            steps.append(ref(arguments[3].progress))
            step(thread, *arguments)
        else:
            may_come.wait()

    decoder = new_decoder(known_weights(covered_model()), num_threads=3)
    monkeypatch.setattr(cpu_kernels, "step", played)
    try:
        token_by_token(decoder, STREAMS[0][:60])
        num_kept = sum(kept() is not None for kept in steps)
    finally:
        may_come.set()

    assert len(steps) == 60
    assert num_kept <= 3, "the newest, and the one that each of two was held up in"


def test_a_helper_that_failed_takes_part_in_later_steps(
    crew: Callable[[Callable[..., None]], CPUDecoder], caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_logits()
    has_failed, has_come = Event(), Event()

    def fail_once(step: Callable[..., None], thread: int, *arguments: Any) -> None:
        if thread == 1 and not has_failed.is_set():
            has_failed.set()
            raise MemoryError("for the arguments of a step")
        step(thread, *arguments)
        if thread == 1:
            has_come.set()

    decoder = crew(fail_once)
    cache = decoder.new_cache()

    first = forward(decoder, STREAMS[0][:59], cache)
    assert has_failed.wait(10)
    second = forward(decoder, STREAMS[0][59:60], cache)

    assert has_come.wait(10)
    assert "thread 1 takes no part in a step" in caplog.text
    assert torch.equal(first, expected[58])
    assert torch.equal(second, expected[59])


def test_the_threads_of_a_decoder_that_nobody_has_any_more_end() -> None:
    before = set(threading.enumerate())
    decoder = new_decoder(known_weights(covered_model()), num_threads=3)
    helpers = set(threading.enumerate()) - before

    del decoder
    gc.collect()
    for helper in helpers:
        helper.join(timeout=10)

    assert len(helpers) == 2
    assert not any(helper.is_alive() for helper in helpers)


# --- Memory --------------------------------------------------------------------------------------


@pytest.fixture
def cramped() -> CPUDecoder:
    """A decoder with room for four blocks."""
    return new_decoder(known_weights(covered_model()), num_blocks=4)


def pool_of(cache: PagedCache) -> Any:
    return cache.table.pool


def test_a_step_without_room_leaves_every_cache_as_it_was(cramped: CPUDecoder) -> None:
    roomy = new_decoder(known_weights(covered_model()))
    said = [token_by_token(roomy, token_ids[:50]) for token_ids in STREAMS[:2]]
    one, other = cramped.new_cache(), cramped.new_cache()
    forward(cramped, STREAMS[0][:16], one)
    forward(cramped, STREAMS[1][:10], other)

    for _ in range(2):
        with pytest.raises(OutOfBlocksError):
            cramped.forward([Piece(STREAMS[0][16:32], one), Piece(STREAMS[1][10:50], other)])

    assert (one.num_tokens, other.num_tokens) == (16, 10)
    assert not one.is_broken
    assert not other.is_broken
    pool_of(one).check()
    assert pool_of(one).num_used == one.num_blocks + other.num_blocks <= 4
    assert one.needed(16) <= pool_of(one).num_free
    together = cramped.forward([Piece(STREAMS[0][16:32], one), Piece(STREAMS[1][10:32], other)])
    assert together[0] is not None
    assert together[1] is not None
    assert torch.equal(together[0], said[0][31])
    assert torch.equal(together[1], said[1][31])
    one.drop()
    assert torch.equal(forward(cramped, STREAMS[1][32:50], other), said[1][49])
    other.drop()
    pool_of(one).check()
    assert pool_of(one).num_free == 4


def test_room_that_was_made_in_vain_can_be_forked_swapped_published_and_undone(
    cramped: CPUDecoder, tmp_path: Path
) -> None:
    said = token_by_token(new_decoder(known_weights(covered_model())), STREAMS[0][:40])
    store = SwapStore(tmp_path)
    cache, other = cramped.new_cache(), cramped.new_cache()
    forward(cramped, STREAMS[0][:20], cache)
    with pytest.raises(OutOfBlocksError):
        cramped.forward([Piece(STREAMS[0][20:36], cache), Piece(STREAMS[1][:30], other)])
    assert cache.num_blocks == 3

    forked = fork(cache, 20)
    assert forked.num_blocks == 2
    assert torch.equal(forward(cramped, STREAMS[0][20:21], forked), said[20])
    forked.drop()
    cache.swap_out(store)
    assert pool_of(cache).num_free == 4
    cache.swap_in()
    cramped.publish("salt", STREAMS[0], cache)
    cache.truncate(17)
    pool_of(cache).check()
    assert torch.equal(forward(cramped, STREAMS[0][17:40], cache), said[39])
    store.close()


def test_a_shared_tail_that_was_copied_in_vain_is_still_right(cramped: CPUDecoder) -> None:
    said = token_by_token(new_decoder(known_weights(covered_model())), STREAMS[0][:30])
    cache, other = cramped.new_cache(), cramped.new_cache()
    forward(cramped, STREAMS[0][:20], cache)
    forked = fork(cache, 20)

    with pytest.raises(OutOfBlocksError):
        cramped.forward([Piece(STREAMS[0][20:21], forked), Piece(STREAMS[1][:40], other)])

    pool_of(cache).check()
    pieces = [Piece(STREAMS[0][20:30], forked), Piece(STREAMS[0][20:21], cache)]
    long, short = cramped.forward(pieces)
    assert long is not None
    assert short is not None
    assert torch.equal(long, said[29])
    assert torch.equal(short, said[20])


# --- What it counts and gives --------------------------------------------------------------------


def test_tokens_and_passes_are_counted() -> None:
    decoder = new_decoder(known_weights(covered_model()))
    one, other = decoder.new_cache(), decoder.new_cache()

    decoder.forward([Piece(IDS[:10], one), Piece(IDS[:1], other, wants_logits=False)])
    decoder.forward([Piece(IDS[10:11], one), Piece(IDS[1:2], other)])

    assert decoder.counters.tokens_forwarded == 13
    assert decoder.counters.forward_passes == 2


def test_warming_up_counts_nothing_and_holds_nothing() -> None:
    decoder = new_decoder(known_weights(covered_model()), num_blocks=1)
    counters = decoder.counters

    decoder.warm_up()

    assert decoder.counters is counters
    assert (counters.tokens_forwarded, counters.forward_passes) == (0, 0)
    assert decoder.new_cache().table.pool.num_used == 0


def test_a_step_may_want_no_logits_at_all(subject: Subject) -> None:
    cache = subject.decoder.new_cache()

    assert subject.decoder.forward([Piece(STREAMS[0][:20], cache, wants_logits=False)]) == [None]

    assert subject.agrees(forward(subject.decoder, STREAMS[0][20:21], cache), 0, 21)


def test_logits_stay_as_they_are_in_later_steps(subject: Subject) -> None:
    cache = subject.decoder.new_cache()

    first = forward(subject.decoder, STREAMS[0][:20], cache)
    forward(subject.decoder, STREAMS[0][20:40], cache)

    assert subject.agrees(first, 0, 20)


def test_it_says_what_it_is() -> None:
    model = covered_model(vocab_size=77, max_position_embeddings=96)
    decoder = new_decoder(known_weights(model), "int8")

    assert repr(decoder) == "compiled, int8, bfloat16 cache, 1 threads"
    assert decoder.device == torch.device("cpu")
    assert decoder.dtype is torch.bfloat16
    assert (decoder.vocab_size, decoder.max_context) == (77, 96)
    assert decoder.runs_ahead


def test_all_positions_that_the_model_was_made_for_can_be_used() -> None:
    model = covered_model(max_position_embeddings=64)
    decoder = new_decoder(known_weights(model))
    token_ids = STREAMS[0][:64]
    cache = decoder.new_cache()

    forward(decoder, token_ids[:63], cache)
    logits = forward(decoder, token_ids[63:], cache)

    assert distance(logits, without_cache(model, token_ids)) < TOLERANCE


@pytest.mark.parametrize("token_ids", [[3] * 65, [3, 77], [-1]], ids=["positions", "ids", "less"])
def test_nothing_is_read_beyond_what_the_model_has(token_ids: list[int]) -> None:
    weights = known_weights(covered_model(vocab_size=77, max_position_embeddings=64))
    decoder = new_decoder(weights)
    cache = decoder.new_cache()

    with pytest.raises(AssertionError):
        forward(decoder, token_ids, cache)

    assert (cache.num_tokens, cache.num_blocks) == (0, 0)
