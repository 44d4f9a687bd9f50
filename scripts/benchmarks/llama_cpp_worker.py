"""Measures llama.cpp: requests on standard input, replies on standard output, a JSON object a line.

Run by the interpreter whose environment holds llama-cpp-python, so it imports nothing of this
project. One request is one measurement; between two of them nothing computes. Each model has two
contexts: one that is held, and one that prefills start from nothing in.
"""

import ctypes
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

api: Any = importlib.import_module("llama_cpp")

_FILE_TYPES = {"Q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "BF16": api.LLAMA_FTYPE_MOSTLY_BF16}
_BATCH_TOKENS = 2048
"""The most in one call; llama.cpp's own default."""

_be_silent = api.llama_log_callback(lambda _level, _text, _data: None)


class Context:
    """One sequence of one model."""

    def __init__(self, model: Any, num_threads: int, room: int) -> None:
        parameters = api.llama_context_default_params()
        parameters.n_ctx = room
        parameters.n_batch = _BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = num_threads
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.num_tokens = 0

    def hold(self, num_tokens: int) -> None:
        if num_tokens < self.num_tokens:
            api.llama_memory_seq_rm(self._memory, 0, num_tokens, -1)
            self.num_tokens = num_tokens
        elif num_tokens > self.num_tokens:
            self._read(self._ids(num_tokens - self.num_tokens))

    def decode(self, num_steps: int) -> float:
        held, token_id = self.num_tokens, 3
        start = time.perf_counter()
        for _ in range(num_steps):
            token_id = self._read([token_id])
        seconds = time.perf_counter() - start
        self.hold(held)
        return seconds

    def append(self, num_tokens: int) -> float:
        held, ids = self.num_tokens, self._ids(num_tokens)
        start = time.perf_counter()
        self._read(ids)
        seconds = time.perf_counter() - start
        self.hold(held)
        return seconds

    def _ids(self, num_tokens: int) -> list[int]:
        first = self.num_tokens
        return [(7919 * i + 31) % self._vocab_size for i in range(first, first + num_tokens)]

    def _read(self, token_ids: list[int]) -> int:
        for start in range(0, len(token_ids), _BATCH_TOKENS):
            chunk = token_ids[start : start + _BATCH_TOKENS]
            tokens = (ctypes.c_int32 * len(chunk))(*chunk)
            if status := api.llama_decode(
                self._context, api.llama_batch_get_one(tokens, len(chunk))
            ):
                raise RuntimeError(f"llama_decode returned {status}")
        self.num_tokens += len(token_ids)
        logits = api.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


class Model:
    """The weights of one file."""

    def __init__(self, path: str, num_threads: int, room: int) -> None:
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        model = api.llama_model_load_from_file(path.encode(), parameters)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.held = Context(model, num_threads, room)
        self.fresh = Context(model, num_threads, room)


def quantize(source: str, target: str, kind: str, num_threads: int) -> None:
    """Write ``target`` from ``source``; it is whole or not there."""
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = _FILE_TYPES[kind]
    parameters.nthread = num_threads
    parameters.allow_requantize = True
    temporary = f"{target}.{os.getpid()}.tmp"
    status = api.llama_model_quantize(source.encode(), temporary.encode(), ctypes.byref(parameters))
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    Path(temporary).replace(target)


class Worker:
    """Answers requests."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        action = request.pop("do")
        if action in ("hold", "decode", "append", "prefill"):
            return self._measure(action, self._models[request["name"]], request["tokens"])
        if action == "hello":
            info = api.llama_print_system_info().decode()
            return {"version": api.__version__, "system": info.strip()}
        if action == "quantize":
            quantize(**request)
        elif action == "load":
            name = request.pop("name")
            self._models[name] = Model(**request)
        else:
            raise RuntimeError(f"unknown request {action!r}")
        return {}

    def _measure(self, action: str, model: Model, num_tokens: int) -> dict[str, Any]:
        if action == "prefill":
            model.fresh.hold(0)
            return {"seconds": model.fresh.append(num_tokens)}
        if action == "hold":
            model.held.hold(num_tokens)
            return {}
        return {"seconds": getattr(model.held, action)(num_tokens)}


def main() -> None:
    """Answer until the input ends."""
    # What the library prints must not get in between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    api.llama_log_set(_be_silent, None)
    api.llama_backend_init()
    worker = Worker()
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  who asked is told
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
