"""A process whose kernels are compiled as for a processor without AVX-512, and checked.

Weights are in 4 bits, and keys and values in float32 or in 8 bits: that is what shares least with
what is compiled for newer processors.
"""

import torch
from torch import Tensor

from sampler import cpu_kernels
from sampler.cpu_decoder import CPUDecoder, can_multiply_pairs
from sampler.kv_cache import KVCache
from sampler.model_runner import Piece
from tests.sampler.cpu_decoders import covered_model, new_decoder, quantise, with_rounded_cache
from tests.sampler.decoders import known_weights
from tests.sampler.families import IDS, TOLERANCE, distance

ENVIRONMENT = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
"""Of this process, read by Numba when it is loaded."""


def main() -> None:
    assert not can_multiply_pairs("int4")
    model = covered_model("Qwen 3", vocab_size=77)
    weights = known_weights(model)
    decoders = {
        kv_dtype: new_decoder(weights, "int4", num_threads=2, kv_dtype=kv_dtype)
        for kv_dtype in (torch.float32, torch.int8)
    }
    quantise(weights, "int4")

    for kv_dtype, decoder in decoders.items():
        one_by_one = said_token_by_token(decoder)
        # Keys and values that lie between two integers may be rounded to either.
        tolerance = 5e-3 if kv_dtype is torch.int8 else TOLERANCE
        for stop in (1, 8, 21, 40):
            expected = with_rounded_cache(model, IDS[:stop], kv_dtype)
            assert distance(one_by_one[stop - 1], expected) < tolerance
        check_batches(decoder, one_by_one)
    check_code()


def said_token_by_token(decoder: CPUDecoder) -> list[Tensor]:
    cache = decoder.new_cache()
    return [said(decoder, [token_id], cache) for token_id in IDS[:40]]


def said(decoder: CPUDecoder, token_ids: list[int], cache: KVCache) -> Tensor:
    [logits] = decoder.forward([Piece(token_ids, cache)])
    assert logits is not None
    return logits


def check_batches(decoder: CPUDecoder, one_by_one: list[Tensor]) -> None:
    """Check that neighbours and chunks change no bit."""
    lengths = (1, 2, 5, 9, 16, 17, 30)
    caches = [decoder.new_cache() for _ in lengths]
    pieces = [Piece(IDS[:n], cache) for n, cache in zip(lengths, caches, strict=True)]
    chunks = decoder.forward(pieces)
    rows = decoder.forward([Piece([IDS[cache.num_tokens]], cache) for cache in caches])
    for n, chunk, row in zip(lengths, chunks, rows, strict=True):
        assert chunk is not None
        assert row is not None
        assert torch.equal(chunk, one_by_one[n - 1])
        assert torch.equal(row, one_by_one[n])


def check_code() -> None:
    compiled = cpu_kernels.step.inspect_asm()
    assert len(compiled) == 2
    for assembly in compiled.values():
        assert "%ymm" in assembly
        assert "%zmm" not in assembly
    # What raised amid a step would leave the other threads waiting. Numba keeps what functions
    # raise as constants, and drops those that cannot be.
    for code in cpu_kernels.step.inspect_llvm().values():
        assert ".const.picklebuf" not in code


if __name__ == "__main__":
    main()
