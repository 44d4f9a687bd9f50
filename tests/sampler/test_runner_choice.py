"""Which runner a model gets. Formats are told by logits: each rounds weights in its own way."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sampler import runner_choice
from sampler.cache_pool import OutOfBlocksError
from sampler.cpu_decoder import CPUDecoder, nearest_lossless_format
from sampler.embedded_model import ensure_embedded_model
from sampler.kv_cache import GenericCache, KVCache, KVShape
from sampler.load_check import check_model
from sampler.model_runner import GenericRunner, ModelRunner, Piece, RunnerWrapper
from sampler.runner_choice import (
    DTYPES,
    KV_DTYPES,
    RunnerChoiceError,
    RunnerOptions,
    choose_runner,
    free_memory,
)
from sampler.step_graphs import CUDACapture
from sampler.torch_decoder import TorchDecoder
from tests.sampler.cpu_decoders import covered_model, kept, new_decoder, quantise
from tests.sampler.decoders import decoder_model, known_weights
from tests.sampler.families import FAMILIES, IDS, family

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
SMALL = {"kv_memory": 1 << 20, "num_threads": 1}


def options(dtype: str = "auto", **others: Any) -> RunnerOptions:
    """Return options that take little memory and no second thread, where not said otherwise."""
    return RunnerOptions(dtype, **(SMALL | others))


def logits_of(runner: ModelRunner) -> torch.Tensor:
    [logits] = runner.forward([Piece(IDS, runner.new_cache())])
    assert isinstance(logits, torch.Tensor)
    return logits


def num_blocks(runner: ModelRunner) -> int:
    return runner.new_cache().table.pool.num_blocks


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "", "FLOAT32", "q4"])
def test_an_unknown_dtype_is_an_error(dtype: str) -> None:
    expected = f"expected a dtype of auto, float32, bfloat16, int8, int4, not {dtype!r}"

    with pytest.raises(RunnerChoiceError, match=expected):
        RunnerOptions(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_mode_is_float32(dtype: str) -> None:
    if dtype in ("auto", "float32"):
        assert RunnerOptions(dtype, is_exact=True).loading_dtype(CUDA) is torch.float32
        return
    with pytest.raises(RunnerChoiceError, match=f"computes in float32, not in {dtype}"):
        RunnerOptions(dtype, is_exact=True)


@pytest.mark.parametrize("kv_dtype", ["float16", "", "INT8", "int4"])
def test_an_unknown_dtype_of_keys_and_values_is_an_error(kv_dtype: str) -> None:
    expected = f"keys and values in one of auto, float32, bfloat16, int8, not {kv_dtype!r}"

    with pytest.raises(RunnerChoiceError, match=expected):
        RunnerOptions(kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_exact_mode_keeps_float32(kv_dtype: str) -> None:
    if kv_dtype in ("auto", "float32"):
        assert RunnerOptions(is_exact=True, kv_dtype=kv_dtype).is_exact
        return
    expected = f"keeps keys and values in float32, not in {kv_dtype}"
    with pytest.raises(RunnerChoiceError, match=expected):
        RunnerOptions(is_exact=True, kv_dtype=kv_dtype)


@pytest.mark.parametrize("num_threads", [0, -1])
def test_no_thread_at_all_is_an_error(num_threads: int) -> None:
    with pytest.raises(RunnerChoiceError, match=f"at least one thread, not {num_threads}"):
        RunnerOptions(num_threads=num_threads)


@pytest.mark.parametrize(
    ("dtype", "on_a_processor", "on_cuda", "on_mps"),
    [
        ("auto", torch.float32, torch.bfloat16, torch.float32),
        ("float32", torch.float32, torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("int8", torch.float32, torch.float32, torch.float32),
        ("int4", torch.float32, torch.float32, torch.float32),
    ],
)
def test_weights_are_loaded_in_what_the_runner_takes(
    dtype: str, on_a_processor: torch.dtype, on_cuda: torch.dtype, on_mps: torch.dtype
) -> None:
    loading = [RunnerOptions(dtype).loading_dtype(device) for device in (CPU, CUDA, MPS)]

    assert loading == [on_a_processor, on_cuda, on_mps]


def test_steps_are_recorded_on_cuda_only_and_not_in_the_exact_mode() -> None:
    assert [RunnerOptions().records_on(device) for device in (CPU, CUDA, MPS)] == [
        False,
        True,
        False,
    ]
    assert not RunnerOptions(is_exact=True).records_on(CUDA)
    assert not RunnerOptions(cuda_graphs=False).records_on(CUDA)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 8), (64, 8)])
def test_there_is_a_thread_on_each_core_up_to_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2 * cores if logical else cores)
    monkeypatch.setattr(runner_choice, "num_usable_cores", lambda: 2 * cores)

    assert RunnerOptions().threads == threads
    assert RunnerOptions(num_threads=12).threads == 12


def test_where_cores_cannot_be_counted_processors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(runner_choice, "num_usable_cores", lambda: 100)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert RunnerOptions().threads == 3

    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert RunnerOptions().threads == 1


def test_there_are_no_more_threads_than_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(runner_choice, "num_usable_cores", lambda: 3)

    assert RunnerOptions().threads == 3


# --- Which runner --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (options(), "int8"),
        (options(is_exact=True), "float32"),
        (options("float32"), "float32"),
        (options("float32", is_exact=True), "float32"),
        (options("bfloat16"), "bfloat16"),
        (options("int8"), "int8"),
        (options("int4"), "int4"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}, {value.is_exact}",
)
def test_what_is_compiled_runs_in_the_format_that_is_asked_for(
    asked: RunnerOptions, form: str
) -> None:
    model = in_dtype(covered_model(), asked.loading_dtype(CPU))

    runner = choose_runner(model, asked)

    assert isinstance(runner, CPUDecoder)
    assert runner.dtype is (torch.float32 if form == "float32" else torch.bfloat16)
    assert logits_of(runner).equal(logits_of(new_decoder(known_weights(model), form)))
    assert runner.counters.forward_passes == 1, "and warming up is not counted"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_keys_and_values_are_kept_in_the_dtype_that_is_asked_for(dtype: str, kv_dtype: str) -> None:
    model = covered_model()

    runner = choose_runner(model, options(dtype, kv_dtype=kv_dtype))

    expected: torch.dtype = getattr(torch, kv_dtype)
    assert runner.dtype is expected
    decoder = new_decoder(known_weights(model), dtype, kv_dtype=expected)
    assert logits_of(runner).equal(logits_of(decoder))


@pytest.mark.slow
def test_a_model_that_was_published_in_4_bits_is_run_in_them() -> None:
    model = covered_model()
    quantise(known_weights(model), "int4")

    runner = choose_runner(model, options())

    assert logits_of(runner).equal(logits_of(new_decoder(known_weights(model), "int4")))


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        (options(), torch.float32),
        (options(is_exact=True), torch.float32),
        (options("float32"), torch.float32),
        (options("bfloat16"), torch.bfloat16),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else value.dtype,
)
def test_what_the_kernels_do_not_cover_is_run_by_torch(
    asked: RunnerOptions, dtype: torch.dtype
) -> None:
    model = in_dtype(decoder_model("Llama"), asked.loading_dtype(CPU))

    runner = choose_runner(model, asked)

    assert isinstance(runner, TorchDecoder)
    assert runner.dtype is dtype


@pytest.mark.parametrize("name", FAMILIES)
def test_any_other_model_runs_through_its_own_class(name: str) -> None:
    # Of all of them only plain Llama is known to our own forward passes.
    expected = TorchDecoder if name == "Llama" else GenericRunner

    runner = choose_runner(family(name), options())

    assert type(runner) is expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_torch_runs_what_is_compiled_elsewhere() -> None:
    model = in_dtype(covered_model(), torch.bfloat16)
    torch.nn.Module.to(model, CUDA)

    runner = choose_runner(model, options())

    assert isinstance(runner, TorchDecoder)
    assert (runner.device.type, runner.dtype) == ("cuda", torch.bfloat16)
    with pytest.raises(RunnerChoiceError, match="int8 is for models on a processor"):
        choose_runner(model, options("int8"))


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cuda_graphs_give_what_steps_give_without_them(
    dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = []

    class Counted(CUDACapture):
        def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
            recorded.append(function)
            return super().__call__(function)

    monkeypatch.setattr(runner_choice, "CUDACapture", Counted)
    model = AutoModelForCausalLM.from_pretrained(
        ensure_embedded_model(), dtype=getattr(torch, dtype), num_hidden_layers=6
    )
    torch.nn.Module.to(model, CUDA)
    with_graphs, without = (
        choose_runner(model, RunnerOptions(dtype, kv_memory=1 << 30, cuda_graphs=is_on))
        for is_on in (True, False)
    )

    with ThreadPoolExecutor(1) as model_thread:  # as in the server
        for one, other in model_thread.submit(decoded_by, (with_graphs, without)).result():
            assert (one - other).abs().max() < other.abs().max() * TOLERANCES[dtype]
            if dtype == "float32":
                assert one.argmax(dim=1).equal(other.argmax(dim=1))

    assert len(recorded) == 5, "for 1, 2, 4 and 8 rows, and for twice the width"
    warned = [record for record in caplog.records if record.name == "sampler.step_graphs"]
    assert not warned, "and all of them are trusted"


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


def decoded_by(runners: Sequence[ModelRunner]) -> list[tuple[torch.Tensor, ...]]:
    """Have all of ``runners`` decode the same: more and more sequences, up to 259 positions.

    Returns:
        Of each step the logits of each runner, ``(rows, vocab)``.
    """
    sequences: list[list[KVCache]] = []
    token_ids: list[int] = []
    steps = []
    for length in (5, 17, 40, 130, 245):
        sequences.append([runner.new_cache() for runner in runners])
        prompt = [(7919 * index + length) % 40_000 for index in range(length)]
        for runner, cache in zip(runners, sequences[-1], strict=True):
            runner.forward([Piece(prompt, cache)])
        token_ids.append(length)
        for _ in range(14):
            steps.append(
                tuple(
                    one_more(runner, token_ids, [caches[index] for caches in sequences])
                    for index, runner in enumerate(runners)
                )
            )
            token_ids = steps[-1][-1].argmax(dim=1).tolist()
    return steps


def one_more(
    runner: ModelRunner, token_ids: Sequence[int], caches: Sequence[KVCache]
) -> torch.Tensor:
    """Forward a token of each sequence; return the logits, ``(rows, vocab)``."""
    pieces = [Piece([one], cache) for one, cache in zip(token_ids, caches, strict=True)]
    rows = runner.forward(pieces)
    return torch.stack([logits for logits in rows if isinstance(logits, torch.Tensor)])


def rows_alone_and_together(runner: ModelRunner) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the logits of one more token of three sequences, each by itself and side by side."""

    def caches() -> list[KVCache]:
        found = []
        for length in (5, 9, 20):
            found.append(runner.new_cache())
            runner.forward([Piece(IDS[:length], found[-1])])
        return found

    alone = [runner.forward([Piece([7], cache)])[0] for cache in caches()]
    together = runner.forward([Piece([7], cache) for cache in caches()])

    def tensors(found: Sequence[object]) -> list[torch.Tensor]:
        return [logits for logits in found if isinstance(logits, torch.Tensor)]

    return tensors(alone), tensors(together)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [covered_model, lambda: decoder_model("Llama"), lambda: family("Gemma3Text")]
)
def test_in_the_exact_mode_nobody_notices_who_else_is_served(model: Any) -> None:
    alone, together = rows_alone_and_together(choose_runner(model(), options(is_exact=True)))

    assert len(alone) == len(together) == 3
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize(("is_exact", "num_passes"), [(False, 1), (True, 2)])
def test_only_the_exact_mode_keeps_a_models_own_class_from_sharing_a_pass(
    is_exact: bool, num_passes: int
) -> None:
    # What makes it unknown to our own forward passes does not keep it from sharing.
    model = family("Llama", {"mlp_bias": True})
    runner = choose_runner(model, options(is_exact=is_exact))
    caches = [runner.new_cache(), runner.new_cache()]
    for cache in caches:
        runner.forward([Piece(IDS[:5], cache)])
    before = runner.counters.forward_passes

    runner.forward([Piece([7], cache) for cache in caches])

    assert isinstance(runner, GenericRunner)
    assert runner.counters.forward_passes - before == num_passes


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "model",
    [decoder_model("Llama"), family("Gemma2")],
    ids=["known but not covered", "not known"],
)
def test_integers_are_an_error_where_nothing_is_compiled(
    model: PreTrainedModel, dtype: str
) -> None:
    with pytest.raises(RunnerChoiceError, match=f"^{dtype} is for models .* this one is not$"):
        choose_runner(model, options(dtype))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
@pytest.mark.parametrize(
    "model",
    [decoder_model("Llama"), family("Gemma2")],
    ids=["known but not covered", "not known"],
)
def test_what_keys_and_values_are_kept_in_is_chosen_only_of_what_is_compiled(
    model: PreTrainedModel, kv_dtype: str
) -> None:
    expected = f"^keys and values in {kv_dtype} are for models .* this one is not$"
    with pytest.raises(RunnerChoiceError, match=expected):
        choose_runner(model, options(kv_dtype=kv_dtype))


# --- Memory --------------------------------------------------------------------------------------

# Two layers, two heads for keys; keys and values of 16 positions each.
COVERED_BYTES = 2 * 2 * 2 * 16 * 32
LLAMA_BYTES = 2 * 2 * 2 * 16 * 8


def unknown_llama() -> PreTrainedModel:
    """Return a model that is run by its own class, and keeps what any Llama does."""
    return family("Llama", {"mlp_bias": True})


@pytest.mark.parametrize(
    ("model", "asked", "block_bytes"),
    [
        (covered_model, {"dtype": "float32"}, 4 * COVERED_BYTES),
        (covered_model, {"dtype": "int8"}, 2 * COVERED_BYTES),
        (covered_model, {"dtype": "int4"}, 2 * COVERED_BYTES),
        (covered_model, {"dtype": "int4", "kv_dtype": "int8"}, COVERED_BYTES * 34 // 32),
        (covered_model, {"dtype": "int8", "kv_dtype": "float32"}, 4 * COVERED_BYTES),
        (lambda: decoder_model("Llama"), {}, 4 * LLAMA_BYTES),
        (
            lambda: in_dtype(decoder_model("Llama"), torch.bfloat16),
            {"dtype": "bfloat16"},
            2 * LLAMA_BYTES,
        ),
        (unknown_llama, {}, 4 * LLAMA_BYTES),
    ],
)
def test_memory_is_as_many_blocks_as_it_holds(
    model: Any, asked: dict[str, Any], block_bytes: int
) -> None:
    for memory, blocks in [
        (block_bytes, 1),
        (7 * block_bytes - 1, 6),
        (7 * block_bytes, 7),
        (7 * block_bytes + 1, 7),
    ]:
        runner = choose_runner(model(), options(**asked, kv_memory=memory))
        assert num_blocks(runner) == blocks
    for memory in (block_bytes - 1, 0, -block_bytes):
        expected = f"{memory} bytes do not hold a single block .* which is {block_bytes}$"
        with pytest.raises(RunnerChoiceError, match=expected):
            choose_runner(model(), options(**asked, kv_memory=memory))


def test_the_bytes_of_a_block_are_those_of_its_tensor() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32)

    assert shape.block_bytes(torch.float32) == 4 * COVERED_BYTES


@pytest.mark.parametrize("model", [lambda: decoder_model("Llama"), unknown_llama])
def test_half_of_what_is_free_is_taken_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr(runner_choice, "free_memory", lambda _: 10 * 4 * LLAMA_BYTES)

    assert num_blocks(choose_runner(model(), options(kv_memory=None))) == 5


def test_what_is_free_on_a_processor_is_what_the_system_has_available() -> None:
    assert 0 < free_memory(CPU) <= psutil.virtual_memory().total


def hold_more_and_more(runner: ModelRunner, caches: list[KVCache]) -> None:
    """Add 500 caches of four tokens to ``caches``."""
    for _ in range(500):
        caches.append(runner.new_cache())
        runner.forward([Piece(IDS[:4], caches[-1])])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Llama"])
def test_caches_of_short_sequences_take_no_more_memory_than_there_is(name: str) -> None:
    memory = 1 << 18
    runner = choose_runner(family(name), options(kv_memory=memory))
    caches: list[KVCache] = []

    with pytest.raises(OutOfBlocksError):
        hold_more_and_more(runner, caches)

    held = [cache.num_bytes for cache in caches if isinstance(cache, GenericCache)]
    assert len(held) == len(caches) > 8
    assert memory / 8 < sum(held) <= memory


def test_memory_that_does_not_hold_the_state_of_one_sequence_is_an_error() -> None:
    model = family("Mamba2")
    found = check_model(model)
    state_bytes = found.handling.num_state_blocks * found.block_bytes

    with pytest.raises(RunnerChoiceError, match=f"the state of one .* which is {state_bytes}, and"):
        choose_runner(model, options(kv_memory=state_bytes))

    choose_runner(model, options(kv_memory=state_bytes + found.block_bytes))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_room_for_a_run(name: str) -> None:
    runner = choose_runner(family(name), options())

    assert num_blocks(runner) > len(IDS)
    assert logits_of(runner).isfinite().all()


# --- The nearest format --------------------------------------------------------------------------


def test_weights_as_they_were_trained_are_kept_in_8_bits() -> None:
    assert nearest_lossless_format(known_weights(covered_model())) == "int8"


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_weights_on_a_grid_are_kept_on_it(form: str) -> None:
    weights = known_weights(covered_model())
    quantise(weights, form)

    assert nearest_lossless_format(weights) == form
    for matrix in (weights.layers[0].qkv, weights.layers[1].gate_up, weights.layers[1].down):
        changed = (kept(matrix, form) - matrix).abs().max()
        assert changed <= 1e-3 * matrix.abs().max(), "packing again changes next to nothing"


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_all_weights_must_be_on_the_grid(layer: int, name: str) -> None:
    weights = known_weights(covered_model())
    quantise(weights, "int4")
    matrix = getattr(weights.layers[layer], name)
    matrix.add_(0.05 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0)))

    assert nearest_lossless_format(weights) == "int8"


@pytest.mark.parametrize("part", [slice(0, 32), slice(-32, None)], ids=["first", "last"])
def test_what_was_joined_to_one_matrix_must_be_on_it_too(part: slice) -> None:
    weights = known_weights(covered_model())
    quantise(weights, "int4")
    matrix = weights.layers[0].qkv[part]
    matrix.add_(0.05 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0)))

    assert nearest_lossless_format(weights) == "int8"


def test_weights_that_are_all_zero_are_on_every_grid() -> None:
    weights = known_weights(covered_model())
    quantise(weights, "int4")
    for layer in weights.layers:
        layer.o.zero_()

    assert nearest_lossless_format(weights) == "int4"


@pytest.mark.slow
def test_the_embedded_model_was_published_in_4_bits() -> None:
    model = AutoModelForCausalLM.from_pretrained(ensure_embedded_model(), dtype=torch.float32)

    assert nearest_lossless_format(known_weights(model)) == "int4"


# --- Torch's threads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "num_threads"),
    [(covered_model, 1), (lambda: decoder_model("Llama"), 6), (lambda: family("Gemma2"), 6)],
    ids=["compiled", "torch", "its own class"],
)
def test_torch_has_the_threads_that_are_not_wanted_elsewhere(model: Any, num_threads: int) -> None:
    runner = choose_runner(model(), options())

    assert runner.torch_threads(6) == num_threads
    assert RunnerWrapper(runner).torch_threads(6) == num_threads
