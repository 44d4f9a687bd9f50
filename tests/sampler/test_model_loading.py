"""Models are loaded from directories that transformers saved. The network is out of reach."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from protocol.items import CallOutput, FunctionCall, Message
from sampler.chat_template import ChatMLFormat, TemplateFormat
from sampler.conversation import Conversation
from sampler.cpu_decoder import CPUDecoder
from sampler.kv_cache import KVCache
from sampler.model_loading import LoadedModel, ModelLoadError, load_model
from sampler.model_runner import Piece
from sampler.runner_choice import DTYPES, RunnerOptions
from tests.sampler.families import MINIMAX, UNFIT_FAMILIES, family
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, WEATHER, byte_tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER_TOOLS = WITH_TOOLS.replace("tool_call>", "function_call>")

NewModel = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with padded logits, that ends a turn with either of two tokens."""
    directory = tmp_path_factory.mktemp("models") / "tiny-chat"
    save_model(directory, hidden_size=16, intermediate_size=32)
    return directory


@pytest.fixture(scope="module")
def compiled_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model like it, of dimensions that the compiled forward pass covers."""
    directory = tmp_path_factory.mktemp("models") / "compiled-chat"
    save_model(directory, hidden_size=32, intermediate_size=64, head_dim=32)
    return directory


def save_model(directory: Path, **dimensions: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=288,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        **dimensions,  # type: ignore[arg-type]
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[IM_END, END_OF_TEXT]
    )
    model.save_pretrained(directory)
    save_tokenizer(directory)


def save_tokenizer(
    directory: Path,
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    fast: FastTokenizer | None = None,
) -> None:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=fast or byte_tokenizer(), eos_token=eos, chat_template=template
    )
    tokenizer.save_pretrained(directory)


@pytest.fixture
def new_model(tiny_directory: Path, tmp_path: Path) -> NewModel:
    """Save the tiny model with another tokenizer, or with files changed."""

    def save(generation: dict[str, Any] | None = None, **tokenizer: Any) -> Path:
        directory = tmp_path / "changed"
        shutil.copytree(tiny_directory, directory)
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        save_tokenizer(directory, **tokenizer)
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return directory

    return save


@pytest.fixture(scope="module")
def tiny(tiny_directory: Path) -> LoadedModel:
    return load_model(tiny_directory, device="cpu")


def options(dtype: str) -> RunnerOptions:
    return RunnerOptions(dtype, kv_memory=1 << 20, num_threads=1)


def logits_after(model: LoadedModel, ids: list[int]) -> Tensor:
    [logits] = model.runner.forward([Piece(ids, model.runner.new_cache())])
    assert isinstance(logits, Tensor)
    return logits


def greedy(model: LoadedModel, ids: list[int], cache: KVCache) -> list[int]:
    """Return ten tokens that go on from ``ids``, the likeliest each."""
    said: list[int] = []
    for _ in range(10):
        [logits] = model.runner.forward([Piece(said[-1:] or ids, cache)])
        assert isinstance(logits, Tensor)
        said.append(int(logits.argmax()))
    return said


def text_of(model: LoadedModel, ids: list[int]) -> str:
    names = {token_id: name for name, token_id in model.tokenizer.added_tokens.items()}
    parts = [names.get(i, "").encode() or model.tokenizer.token_bytes(i) for i in ids]
    return b"".join(parts).decode()


# --- What belongs to a model ---------------------------------------------------------------------


def test_a_directory_gives_the_model_its_name(tiny: LoadedModel) -> None:
    assert tiny.name == "tiny-chat"


def test_a_relative_directory_gives_the_model_its_name(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_directory)

    assert load_model(".", device="cpu").name == "tiny-chat"


def test_the_model_runs(tiny: LoadedModel) -> None:
    logits = logits_after(tiny, tiny.tokenizer.encode_text("Hi."))

    assert logits.shape == (288,)
    assert tiny.runner.max_context == 512


def test_the_tokenizer_knows_the_padded_vocabulary_and_counts_for_the_runner(
    tiny: LoadedModel,
) -> None:
    assert tiny.tokenizer.vocab_size == tiny.runner.vocab_size == 288
    assert tiny.tokenizer.counters is tiny.runner.counters


def test_all_ends_of_turn_of_the_generation_config_stop(tiny: LoadedModel) -> None:
    assert tiny.tokenizer.stop_ids == {END_OF_TEXT, IM_END}


@pytest.mark.parametrize(
    ("generation", "eos", "stop_ids"),
    [
        ({"eos_token_id": END_OF_TEXT}, "<|im_end|>", {END_OF_TEXT, IM_END}),
        ({"eos_token_id": [IM_END]}, "<|im_end|>", {IM_END}),
        ({}, "<|im_end|>", {IM_END}),
    ],
)
def test_the_end_of_turn_of_the_tokenizer_stops_too(
    new_model: NewModel, generation: dict[str, Any], eos: str, stop_ids: set[int]
) -> None:
    directory = new_model(generation=generation, eos=eos)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))

    assert load_model(directory, device="cpu").tokenizer.stop_ids == stop_ids


# --- Chat formats --------------------------------------------------------------------------------


def test_a_chatml_model_that_knows_no_tools_gets_the_format_written_by_hand(
    tiny: LoadedModel,
) -> None:
    assert isinstance(tiny.chat_format, ChatMLFormat)

    ids = tiny.chat_format.prompt_ids(Conversation([Message("user", "Hi.")]))

    assert text_of(tiny, ids) == (
        "<|im_start|>system\nYou are tiny.<|im_end|>\n"
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chatml_model_without_a_default_system_message_gets_none(new_model: NewModel) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    model = load_model(new_model(template=template), device="cpu")

    ids = model.chat_format.prompt_ids(Conversation([Message("user", "Hi.")]))

    assert text_of(model, ids) == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_knows_tools_is_used(new_model: NewModel) -> None:
    model = load_model(new_model(template=WITH_TOOLS), device="cpu")

    assert isinstance(model.chat_format, TemplateFormat)
    ids = model.chat_format.prompt_ids(Conversation([Message("user", "Hi.")], tools=[WEATHER]))
    assert text_of(model, ids).startswith('<|im_start|>system\n[{"type": "function"')
    suffix = model.chat_format.suffix_ids(
        [FunctionCall("call_1", "f", "{}")], [CallOutput("call_1", "4")]
    )
    assert text_of(model, suffix) == ("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")


def test_the_tool_template_is_chosen_among_several(new_model: NewModel) -> None:
    directory = new_model(template=None)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": WITH_TOOLS},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    model = load_model(directory, device="cpu")

    assert isinstance(model.chat_format, TemplateFormat)


def test_chatml_whose_tool_calls_are_of_another_kind_gets_the_format_written_by_hand(
    new_model: NewModel,
) -> None:
    model = load_model(new_model(template=OTHER_TOOLS), device="cpu")

    assert isinstance(model.chat_format, ChatMLFormat)


def test_where_calls_are_not_known_tools_are_told_in_the_prompt_and_the_log_says_so(
    new_model: NewModel, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    description = json.loads(byte_tokenizer().to_str().replace("<|im_end|>", "</s>"))
    fast = FastTokenizer.from_str(json.dumps(description).replace("<|im_start|>", "<s>"))

    model = load_model(new_model(template=template, eos="</s>", fast=fast), device="cpu")

    assert isinstance(model.chat_format, TemplateFormat)
    assert "told in the prompt" in caplog.text
    ids = model.chat_format.prompt_ids(Conversation([Message("user", "Hi.")], tools=[WEATHER]))
    assert "get_weather(city: string)" in text_of(model, ids)
    assert "[user] Hi.</s>" in text_of(model, ids)


# Qwen 3 has a switch for thoughts, QwQ always opens them.
SWITCHED = WITH_TOOLS.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}{% endif %}",
)


@pytest.mark.parametrize(
    ("switch", "opening"), [(None, ""), (True, "<think>\n"), (False, "<think>\n\n</think>\n\n")]
)
def test_a_template_is_told_whether_to_think_where_a_client_says_so(
    new_model: NewModel, switch: bool | None, opening: str
) -> None:
    model = load_model(new_model(template=SWITCHED), device="cpu")

    ids = model.chat_format.prompt_ids(
        Conversation([Message("user", "Hi.")], enable_thinking=switch)
    )

    assert text_of(model, ids).endswith(f"<|im_start|>assistant\n{opening}")
    assert model.chat_format.opens_thinking(ids) == (switch is True)


def byte_tokenizer_with(*words: str) -> FastTokenizer:
    fast = byte_tokenizer()
    fast.add_tokens(list(words))
    return fast


@pytest.mark.parametrize(
    ("template", "words", "thinks"),
    [
        (CHATML, [], False),
        (WITH_TOOLS, [], False),
        (CHATML, ["<think>", "</think>"], True),
        (WITH_TOOLS, ["<think>", "</think>"], True),
        (SWITCHED, [], True),
        (SWITCHED.replace("tool_call>", "function_call>"), [], True),
    ],
)
def test_a_model_thinks_if_its_vocabulary_or_its_template_has_a_word_for_it(
    new_model: NewModel, template: str, words: list[str], thinks: bool
) -> None:
    directory = new_model(template=template, fast=byte_tokenizer_with(*words))

    assert load_model(directory, device="cpu").chat_format.thinks is thinks


def test_chatml_that_knows_of_thoughts_is_not_written_by_hand(new_model: NewModel) -> None:
    template = SWITCHED.replace("tool_call>", "function_call>")

    model = load_model(new_model(template=template), device="cpu")

    assert isinstance(model.chat_format, TemplateFormat)
    conversation = Conversation([Message("user", "Hi.")], tools=[WEATHER], enable_thinking=False)
    text = text_of(model, model.chat_format.prompt_ids(conversation))
    assert "get_weather(city: string)" in text
    assert text.endswith("</think>\n\n")


def test_the_end_of_a_turn_is_what_the_template_ends_one_with(new_model: NewModel) -> None:
    template = WITH_TOOLS.replace("<|im_end|>", "<|endoftext|>")

    model = load_model(new_model(template=template), device="cpu")

    assert model.tokenizer.stop_ids == {END_OF_TEXT, IM_END}
    assert model.chat_format.end_of_turn == END_OF_TEXT


# --- Devices and dtypes --------------------------------------------------------------------------


def test_on_a_cpu_auto_is_float32(tiny: LoadedModel) -> None:
    assert tiny.runner.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_can_be_asked_for(tiny_directory: Path, dtype: str) -> None:
    model = load_model(tiny_directory, device="cpu", options=options(dtype))

    assert model.runner.dtype is getattr(torch, dtype)


def test_logits_are_float32_whatever_the_dtype(tiny_directory: Path) -> None:
    model = load_model(tiny_directory, device="cpu", options=options("bfloat16"))

    assert logits_after(model, [IM_START]).dtype is torch.float32


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_dtype_that_a_model_cannot_be_run_in_is_an_error(
    tiny_directory: Path, dtype: str
) -> None:
    expected = f"^cannot run the model 'tiny-chat': {dtype} is for models on a processor"

    with pytest.raises(ModelLoadError, match=expected):
        load_model(tiny_directory, device="cpu", options=options(dtype))


def test_memory_that_does_not_hold_a_block_is_an_error(tiny_directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot run the model 'tiny-chat': 10 bytes do not"):
        load_model(tiny_directory, device="cpu", options=RunnerOptions(kv_memory=10))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_is_compiled_runs_in_any_dtype(compiled_directory: Path, dtype: str) -> None:
    model = load_model(compiled_directory, device="cpu", options=options(dtype))
    network = LlamaForCausalLM.from_pretrained(compiled_directory, dtype=torch.float32)

    ids = model.tokenizer.encode_text("Hi.")
    cache = model.runner.new_cache()
    said = greedy(model, ids, cache)

    assert isinstance(model.runner, CPUDecoder)
    assert cache.num_tokens == len(ids) + len(said) - 1
    assert model.runner.counters.tokens_forwarded == cache.num_tokens
    assert said == greedy(model, ids, model.runner.new_cache())
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    # The share of the logits' spread that the format may change.
    tolerance = {"float32": 1e-5, "bfloat16": 0.03, "auto": 0.03, "int8": 0.03, "int4": 0.3}[dtype]
    difference = (logits_after(model, ids) - expected).abs().max()
    assert difference < tolerance * (expected.max() - expected.min())


@pytest.mark.slow
def test_the_exact_mode_can_be_asked_for(compiled_directory: Path) -> None:
    exact = RunnerOptions(is_exact=True, kv_memory=1 << 20, num_threads=2)

    assert load_model(compiled_directory, device="cpu", options=exact).runner.dtype is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_cuda_that_is_not_there_is_an_error(tiny_directory: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot use the device 'cuda': .*CUDA") as caught:
        load_model(tiny_directory, device="cuda")

    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="has MPS")
def test_an_mps_that_is_not_there_is_an_error(tiny_directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot use the device 'mps'"):
        load_model(tiny_directory, device="mps")


def test_a_device_that_does_not_exist_is_an_error(tiny_directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot use the device 'abacus'"):
        load_model(tiny_directory, device="abacus")


# --- Models that cannot be loaded ----------------------------------------------------------------


@pytest.mark.parametrize("given", [str, Path])
def test_a_directory_that_is_not_there_is_an_error_that_names_it(
    tmp_path: Path, given: Callable[[Path], str | Path]
) -> None:
    missing = tmp_path / "no-such-model"

    with pytest.raises(ModelLoadError, match="there is no model directory") as caught:
        load_model(given(missing), device="cpu")

    assert str(missing) in str(caught.value)


@pytest.mark.parametrize("source", [Path("no-such-model"), "./no-such-model", "~/no-such-model"])
def test_what_is_written_as_a_path_is_not_looked_for_on_the_hub(source: str | Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no model directory"):
        load_model(source, device="cpu")


def test_an_id_that_is_not_cached_is_an_error_when_offline() -> None:
    with pytest.raises(ModelLoadError, match="nobody/no-such-model") as caught:
        load_model("nobody/no-such-model", device="cpu")

    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"cannot load the model {tmp_path.name!r}"):
        load_model(tmp_path, device="cpu")


def test_damaged_weights_are_an_error(new_model: NewModel) -> None:
    directory = new_model()
    (directory / "model.safetensors").write_bytes(b"\0" * 100)

    with pytest.raises(ModelLoadError, match="cannot load the model 'changed'"):
        load_model(directory, device="cpu")


def test_a_model_without_a_chat_template_is_an_error(new_model: NewModel) -> None:
    directory = new_model(template=None)

    with pytest.raises(ModelLoadError, match="the model 'changed' has no chat template"):
        load_model(directory, device="cpu")


# Ends a turn only once another follows, so nothing tells where a sampled turn ends.
NO_END = WITH_TOOLS.replace(
    "<|im_end|>\n{% endfor %}", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
)


def test_a_template_by_which_no_run_could_be_resumed_is_an_error(new_model: NewModel) -> None:
    with pytest.raises(ModelLoadError, match=r"no run of 'changed' can be resumed"):
        load_model(new_model(template=NO_END), device="cpu")


@pytest.mark.parametrize(
    ("name", "dimensions", "reason"),
    [
        ("Mamba", UNFIT_FAMILIES["Mamba"], "it does not go on .* so it cannot suspend"),
        ("MiniMax", MINIMAX, "its own class fails on a cache: MiniMax uses cache of its own"),
    ],
)
def test_a_model_that_does_not_go_on_where_its_cache_ends_is_an_error(
    tmp_path: Path, name: str, dimensions: dict[str, Any], reason: str
) -> None:
    directory = tmp_path / "unfit"
    family(name, {**dimensions, "vocab_size": 288}).save_pretrained(directory)
    save_tokenizer(directory)

    with pytest.raises(ModelLoadError, match=f"cannot run the model 'unfit': {reason}"):
        load_model(directory, device="cpu")


def test_loading_leaves_nothing_counted_as_forwarded(tiny_directory: Path) -> None:
    assert load_model(tiny_directory, device="cpu").runner.counters.tokens_forwarded == 0


def test_the_end_of_turn_of_chatml_stops_whatever_the_configuration_says(
    new_model: NewModel,
) -> None:
    directory = new_model({"eos_token_id": END_OF_TEXT}, eos="<|endoftext|>")

    assert load_model(directory, device="cpu").tokenizer.stop_ids == {END_OF_TEXT, IM_END}
