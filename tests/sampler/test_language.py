"""A model's language is had without its weights. The network is out of reach."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
from transformers import PreTrainedTokenizerFast

from protocol.items import Message
from sampler.chat_template import ChatMLFormat, TemplateFormat
from sampler.conversation import Conversation
from sampler.embedded_model import EMBEDDED_MODEL_NAME
from sampler.language import ModelLoadError, load_language
from tests.sampler.smollm2 import VOCAB_SIZE, smollm2_directory
from tests.tiny_model import END_OF_TEXT, IM_END, IM_START, WEATHER, byte_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = {"model_type": "llama", "vocab_size": 288, "max_position_embeddings": 512}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the network was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


def save(
    directory: Path,
    *,
    template: str | None = TEMPLATE,
    eos: str | None = "<|im_end|>",
    **files: dict[str, Any],
) -> Path:
    """Save a tokenizer, and ``files`` by their names without ``.json``; there are no weights."""
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_tokenizer(), eos_token=eos, chat_template=template
    )
    tokenizer.save_pretrained(directory)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_a_directory_without_weights_has_all_that_it_takes_to_speak(tmp_path: Path) -> None:
    directory = save(
        tmp_path / "tiny", config=LLAMA, generation_config={"eos_token_id": [IM_END, END_OF_TEXT]}
    )

    language = load_language(directory)

    assert language.name == "tiny"
    assert language.tokenizer.vocab_size == 288
    assert language.tokenizer.stop_ids == {END_OF_TEXT, IM_END}
    assert language.max_context == 512
    assert isinstance(language.chat_format, TemplateFormat)
    assert language.chat_format.end_of_turn == IM_END
    ids = language.chat_format.prompt_ids(Conversation([Message("user", "Hi")], tools=[WEATHER]))
    assert ids[0] == IM_START


def test_without_a_generation_config_the_config_tells_what_ends_a_turn(tmp_path: Path) -> None:
    directory = save(tmp_path, config=LLAMA | {"eos_token_id": END_OF_TEXT})

    assert load_language(directory).tokenizer.stop_ids == {END_OF_TEXT, IM_END}


@pytest.mark.parametrize("files", [{}, {"config": {"model_type": "made up", "vocab_size": 288}}])
def test_without_a_config_that_is_known_the_vocabulary_is_the_tokenizers(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    language = load_language(save(tmp_path, **files))

    assert language.tokenizer.vocab_size == 259
    assert language.max_context is None
    assert language.tokenizer.stop_ids == {IM_END}


def test_the_part_that_reads_text_says_how_large_the_vocabulary_is(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"}}

    language = load_language(save(tmp_path, config=config))

    assert (language.tokenizer.vocab_size, language.max_context) == (288, 512)


@pytest.mark.slow
def test_the_embedded_model_has_a_language() -> None:
    language = load_language()

    assert language.name == EMBEDDED_MODEL_NAME
    assert language.tokenizer.vocab_size == VOCAB_SIZE
    assert language.max_context == 8192
    assert isinstance(language.chat_format, ChatMLFormat)


@pytest.mark.slow
def test_the_weights_of_a_model_are_not_looked_at(tmp_path: Path) -> None:
    directory = shutil.copytree(
        smollm2_directory(), tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")
    )

    assert load_language(directory).chat_format.end_of_turn == IM_END


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no model directory"):
        load_language(tmp_path / "nowhere")


def test_what_is_neither_there_nor_on_the_hub_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="cannot load the model 'no/such-model'"):
        load_language("no/such-model")


def test_a_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    with pytest.raises(ModelLoadError):
        load_language(tmp_path)


def test_a_model_without_a_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no chat template"):
        load_language(save(tmp_path, template=None))


def test_a_model_that_never_ends_a_turn_is_an_error(tmp_path: Path) -> None:
    directory = save(tmp_path, eos=None)
    tokenizer = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|end|>"))

    with pytest.raises(ModelLoadError, match="nothing tells what ends a turn"):
        load_language(directory)
