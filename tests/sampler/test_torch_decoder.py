"""Our forward pass is checked against that of the transformers library, without any cache."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sampler.cache_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from sampler.kv_cache import KVShape, PagedCache, PagedStorage
from sampler.model_runner import Piece
from sampler.swap import SwapStore
from sampler.torch_decoder import TorchDecoder
from tests.sampler.decoders import DECODERS, decoder_model, known_weights
from tests.sampler.families import IDS, TOLERANCE, distance, without_cache
from tests.sampler.smollm2 import smollm2_directory

# A prompt in chunks, single tokens, a pending token and its suffix; at the ends of blocks and not.
CUTS = {
    "whole": [],
    "in two": [20],
    "at the ends of blocks": [16, 32],
    "as a run does": [6, 12, 13, 14, 15, 16, 17, 30, 31, 32, 33],
    "one by one": list(range(1, 40)),
}


class Decoder(NamedTuple):
    """A decoder, beside the model that it is to equal."""

    runner: TorchDecoder
    model: PreTrainedModel
    pool: BlockPool

    def read(self, cache: PagedCache, *chunks: Sequence[int]) -> Tensor:
        """Forward ``chunks`` one after the other; return the logits after the last."""
        return [one(self.runner.forward([Piece(chunk, cache)])) for chunk in chunks][-1]

    def held(self, token_ids: Sequence[int]) -> PagedCache:
        """Return a cache that holds ``token_ids``."""
        cache = self.runner.new_cache()
        self.read(cache, token_ids)
        return cache

    def check(self, logits: Tensor | None, token_ids: Sequence[int]) -> None:
        assert logits is not None
        assert distance(logits, without_cache(self.model, token_ids)) < TOLERANCE


def decoder(
    model: PreTrainedModel | None = None, *, is_exact: bool = False, num_blocks: int = 40
) -> Decoder:
    model = decoder_model("Llama") if model is None else model
    weights = known_weights(model)
    pool = BlockPool(num_blocks)
    shape = weights.shape
    kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    storage = PagedStorage(pool, kv_shape, weights.dtype)
    # As bad as memory that was never written can be.
    storage.tensor.fill_(torch.nan)
    return Decoder(TorchDecoder(weights, storage, is_exact=is_exact), model, pool)


def one(logits: Sequence[Tensor | None]) -> Tensor:
    [only] = logits
    assert only is not None
    return only


def cut(token_ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *cuts, len(token_ids)]
    return [token_ids[start:stop] for start, stop in itertools.pairwise(edges)]


@pytest.fixture(params=[False, True], ids=["fast", "exact"])
def is_exact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def some(is_exact: bool) -> Decoder:
    return decoder(is_exact=is_exact)


# --- One sequence --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_pieces_give_what_the_model_gives_in_one_pass(name: str, is_exact: bool) -> None:
    it = decoder(decoder_model(name), is_exact=is_exact)
    expected = without_cache(it.model, IDS)

    got = {how: it.read(it.runner.new_cache(), *cut(IDS, cuts)) for how, cuts in CUTS.items()}

    assert {how: distance(logits, expected) for how, logits in got.items()} == pytest.approx(
        dict.fromkeys(CUTS, 0.0), abs=TOLERANCE
    )


def test_logits_are_float32_over_the_vocabulary() -> None:
    it = decoder(nn.Module.to(decoder_model("Llama"), torch.bfloat16))

    logits = it.read(it.runner.new_cache(), IDS[:20], IDS[20:])

    assert logits.shape == (it.runner.vocab_size,) == (64,)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad
    assert it.runner.dtype == torch.bfloat16
    assert it.runner.device == torch.device("cpu")


def test_in_bfloat16_it_is_as_near_to_float32_as_the_model_is() -> None:
    exact = without_cache(decoder_model("Llama"), IDS)
    it = decoder(nn.Module.to(decoder_model("Llama"), torch.bfloat16))

    ours = distance(it.read(it.runner.new_cache(), IDS), exact)

    assert ours < 2 * distance(without_cache(it.model, IDS).float(), exact)


def test_it_says_what_the_model_says_of_itself() -> None:
    runner = decoder().runner

    assert runner.max_context == 128
    assert runner.runs_ahead


def test_counters_count_positions_and_steps() -> None:
    it = decoder()

    one_cache, other = it.held(IDS[:7]), it.held(IDS[:5])
    it.runner.forward([Piece([9], one_cache), Piece([9, 8], other)])

    assert it.runner.counters.tokens_forwarded == 15
    assert it.runner.counters.forward_passes == 3
    assert (one_cache.num_tokens, other.num_tokens) == (8, 7)


# --- Many sequences in one step ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_pieces_of_all_kinds_share_a_step(name: str, is_exact: bool) -> None:
    it = decoder(decoder_model(name), is_exact=is_exact)
    # What is held, and what is new: rows that decode, chunks first and later, in any order.
    held = [IDS[:5], [], IDS[:31], IDS[:16], IDS[3:20], [], (IDS * 3)[:100], IDS[:15]]
    new = [[9], IDS[:20], [8], [7], IDS[:9], [5], [6], [4, 3]]
    caches = [it.held(ids) if ids else it.runner.new_cache() for ids in held]

    rows = it.runner.forward([Piece(*piece) for piece in zip(new, caches, strict=True)])
    after = it.runner.forward([Piece([11], cache) for cache in caches])

    for index, (row, next_row) in enumerate(zip(rows, after, strict=True)):
        it.check(row, [*held[index], *new[index]])
        it.check(next_row, [*held[index], *new[index], 11])


def test_logits_that_are_not_wanted_are_not_returned(some: Decoder) -> None:
    caches = [some.held(IDS[:length]) for length in (4, 20, 9)]

    rows = some.runner.forward(
        [
            Piece(IDS[:18], caches[0], wants_logits=False),
            Piece([9], caches[1]),
            Piece([8], caches[2], wants_logits=False),
        ]
    )
    nothing = some.runner.forward([Piece([7], caches[0], wants_logits=False)])

    assert [row is None for row in rows] == [True, False, True]
    some.check(rows[1], [*IDS[:20], 9])
    assert nothing == [None]
    some.check(some.read(caches[0], [6]), [*IDS[:4], *IDS[:18], 7, 6])


def test_a_step_without_pieces_does_nothing(some: Decoder) -> None:
    assert some.runner.forward([]) == []
    assert some.runner.counters.forward_passes == 0


# --- Caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 13, 16, 20, 32])
def test_forks_and_their_parent_go_on_by_themselves(some: Decoder, length: int) -> None:
    parent = some.held(IDS[:33])
    fork, twin = parent.fork(length), parent.fork(length)
    assert fork is not None
    assert twin is not None

    rows = some.runner.forward([Piece([9], parent), Piece([8], fork), Piece([7, 6, 5], twin)])
    after = some.runner.forward([Piece([4], cache) for cache in (parent, fork, twin)])

    held = [[*IDS[:33], 9], [*IDS[:length], 8], [*IDS[:length], 7, 6, 5]]
    for ids, row, next_row in zip(held, rows, after, strict=True):
        some.check(row, ids)
        some.check(next_row, [*ids, 4])
    some.pool.check()


def test_positions_that_were_dropped_are_not_seen(some: Decoder) -> None:
    cache = some.held(IDS[:33])

    cache.truncate(18)
    logits = some.read(cache, [9], [8, 7])

    some.check(logits, [*IDS[:18], 9, 8, 7])


def test_blocks_that_others_have_used_are_as_good_as_new(some: Decoder) -> None:
    other = some.held((IDS * 3)[:100])
    other.drop()

    cache = some.held(IDS[:20])

    some.check(some.read(cache, [9]), [*IDS[:20], 9])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapStore]:
    store = SwapStore(tmp_path)
    yield store
    store.close()


def test_what_comes_back_from_a_file_is_gone_on_with(some: Decoder, store: SwapStore) -> None:
    cache = some.held(IDS[:37])
    before = list(cache.table.blocks)

    cache.swap_out(store)
    some.held(IDS)
    occupier = some.held(IDS[5:20])
    cache.swap_in()

    assert cache.table.blocks != before
    rows = some.runner.forward([Piece([9], cache), Piece([8], occupier)])
    some.check(rows[0], [*IDS[:37], 9])
    some.check(rows[1], [*IDS[5:20], 8])


def test_what_was_published_is_found_and_gone_on_with(some: Decoder) -> None:
    token_ids = [*IDS[:37], 9]
    some.runner.publish("key", IDS[:37], some.held(IDS[:37]))

    cache = some.runner.find_prefix("key", token_ids)

    assert isinstance(cache, PagedCache)
    assert cache.num_tokens == 2 * BLOCK_SIZE
    some.check(some.read(cache, token_ids[2 * BLOCK_SIZE :]), token_ids)


def test_a_prefix_leaves_a_token_for_the_logits(some: Decoder) -> None:
    token_ids = IDS[: 2 * BLOCK_SIZE]
    holder = some.held(token_ids)
    some.runner.publish("key", token_ids, holder)

    cache = some.runner.find_prefix("key", token_ids)

    assert isinstance(cache, PagedCache)
    assert cache.num_tokens == 2 * BLOCK_SIZE - 1
    some.check(some.read(cache, token_ids[-1:]), token_ids)
    some.check(some.read(holder, [9]), [*token_ids, 9])


def test_a_prefix_is_not_found_by_others(some: Decoder) -> None:
    some.runner.publish("key", IDS, some.held(IDS))

    assert some.runner.find_prefix("another", IDS) is None
    assert some.runner.find_prefix("key", IDS[1:]) is None


# --- Failures ------------------------------------------------------------------------------------


def test_caches_on_which_a_pass_fails_are_as_they_were(some: Decoder) -> None:
    parent = some.held(IDS[:20])
    fork, other = parent.fork(18), some.held(IDS[:15])
    assert fork is not None

    with pytest.raises(IndexError):
        some.runner.forward([Piece([9, 8], fork), Piece([7], other), Piece([10_000], parent)])

    assert [cache.num_tokens for cache in (parent, fork, other)] == [20, 18, 15]
    assert not any(cache.is_broken for cache in (parent, fork, other))
    rows = some.runner.forward([Piece([9], fork), Piece([8], other), Piece([7], parent)])
    for row, ids in zip(rows, ([*IDS[:18], 9], [*IDS[:15], 8], [*IDS[:20], 7]), strict=True):
        some.check(row, ids)
    some.pool.check()


def test_without_room_in_the_pool_nothing_is_forwarded(is_exact: bool) -> None:
    it = decoder(is_exact=is_exact, num_blocks=3)
    small, full = it.held(IDS[:15]), it.held(IDS[:BLOCK_SIZE])
    before = it.runner.counters.forward_passes

    with pytest.raises(OutOfBlocksError):
        it.runner.forward([Piece([9, 8], small), Piece([7], full)])

    assert (small.num_tokens, full.num_tokens) == (15, BLOCK_SIZE)
    assert it.runner.counters.forward_passes == before
    small.drop()
    it.check(it.read(full, [7]), [*IDS[:BLOCK_SIZE], 7])


# --- Exact mode ----------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_company(it: Decoder, token_ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """Forward ``token_ids`` in pieces, while others come and go."""
    cache = it.runner.new_cache()
    others = [it.held(IDS[index : 10 + 5 * index]) for index in range(1, 8)]
    logits: Tensor | None = None
    for count, chunk in enumerate(cut(token_ids, cuts)):
        company = [Piece([20 + count], other) for other in others[: count % 8]]
        at = count % (len(company) + 1)
        rows = it.runner.forward([*company[:at], Piece(chunk, cache), *company[at:]])
        logits = rows[at]
    assert logits is not None
    return logits


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", ["Llama", "SmolLM", "Llama, one head", "Qwen 2", "Qwen 3"])
def test_exact_logits_depend_neither_on_company_nor_on_cuts(name: str) -> None:
    it = decoder(decoder_model(name), is_exact=True, num_blocks=200)
    alone = it.read(it.runner.new_cache(), IDS)

    got = {how: in_company(it, IDS, cuts) for how, cuts in CUTS.items()}

    assert {how: distance(logits, alone) for how, logits in got.items()} == dict.fromkeys(CUTS, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
def test_exact_logits_at_real_sizes_depend_on_neither() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_directory(), dtype=torch.float32, num_hidden_layers=2
    )
    it = decoder(model, is_exact=True, num_blocks=150)
    # Beyond what attention takes at a time.
    ids = torch.randint(3, 49_152, (540,), generator=torch.Generator().manual_seed(1)).tolist()
    alone = it.read(it.runner.new_cache(), ids)

    got = in_company(it, ids, [300, 301, 302, 500, 509, 510, 511, 512, 513, 530])

    assert got.equal(alone)
    it.check(got, ids)


# --- Devices -------------------------------------------------------------------------------------


def test_on_another_device_everything_is_there(is_exact: bool) -> None:
    # A device that every torch has: it knows shapes, and mostly refuses to mix with others.
    meta = torch.device("meta")
    weights = known_weights(decoder_model("Qwen 2"))
    there = replace(
        moved(weights, meta), layers=tuple(moved(layer, meta) for layer in weights.layers)
    )
    storage = PagedStorage(BlockPool(20), KVShape(2, 2, 8), weights.dtype, meta)
    runner = TorchDecoder(there, storage, is_exact=is_exact)
    caches = [runner.new_cache() for _ in range(3)]
    runner.forward([Piece(IDS, caches[0]), Piece(IDS[:5], caches[1])])

    rows = runner.forward(
        [Piece([9], caches[0]), Piece([8], caches[1]), Piece(IDS[:20], caches[2])]
    )
    after = runner.forward([Piece([9, 8, 7], caches[0])])

    for row in (*rows, *after):
        assert row is not None
        assert row.device == meta
        assert row.shape == (64,)


def moved(weights: Any, device: torch.device) -> Any:
    tensors = {name: part for name, part in vars(weights).items() if isinstance(part, Tensor)}
    return replace(weights, **{name: tensor.to(device) for name, tensor in tensors.items()})
