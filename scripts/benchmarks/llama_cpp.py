"""llama.cpp in a process of its own: another environment, and OpenMP threads that are its own."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs

from sampler.embedded_model import published_weights
from scripts.benchmarks.contender import Contender

WORKER = Path(__file__).with_name("llama_cpp_worker.py")
ROOM_TOKENS = 6400
"""Positions of a context."""


class LlamaCppError(RuntimeError):
    """llama.cpp could not do what it was asked for; the message says why."""


def find_python(given: Path | None) -> Path | None:
    """Return the interpreter that has llama-cpp-python: ``given``, or this one if it has it."""
    if given is not None:
        return given
    return Path(sys.executable) if importlib.util.find_spec("llama_cpp") else None


class LlamaCpp:
    """The process, and the models that it has loaded. To be closed."""

    def __init__(
        self, python: Path, num_threads: int, command: Sequence[str] | None = None
    ) -> None:
        """Start it.

        Args:
            python: the interpreter.
            num_threads: that compute.
            command: instead of the interpreter with the worker.

        Raises:
            LlamaCppError: it does not answer.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            command or [str(python), "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._num_threads = num_threads
        self._contenders: dict[str, LlamaCppModel] = {}
        try:
            hello = self.ask("hello")
        except LlamaCppError:
            self.close()
            raise
        self.version: str = hello["version"]
        self.system: str = hello["system"]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def contender(self, kind: str) -> "LlamaCppModel":
        """Return the model in one of ``Q4_1``, as it was published, ``Q8_0`` and ``BF16``."""
        if kind not in self._contenders:
            path = self._file(kind)
            self.ask(
                "load", name=kind, path=str(path), num_threads=self._num_threads, room=ROOM_TOKENS
            )
            self._contenders[kind] = LlamaCppModel(self, kind)
        return self._contenders[kind]

    def ask(self, action: str, **members: Any) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            LlamaCppError: it failed, or the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": action, **members}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LlamaCppError("the process of llama.cpp has ended") from error
        line = self._process.stdout.readline()
        if not line:
            raise LlamaCppError("the process of llama.cpp has ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise LlamaCppError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()  # it ends when its input does

    def _file(self, kind: str) -> Path:
        """Return the file of the weights; those in other formats are made of it once."""
        source = published_weights()
        if kind == "Q4_1":
            return source
        target = _cache_directory() / f"{source.stem.removesuffix('.Q4_1')}.{kind}.gguf"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            self.ask(
                "quantize",
                source=str(source),
                target=str(target),
                kind=kind,
                num_threads=self._num_threads,
            )
        return target


def _cache_directory() -> Path:
    override = os.environ.get("SUSPENDED_SAMPLING_CACHE")
    cache = Path(override) if override else platformdirs.user_cache_path("suspended-sampling")
    return cache / "bench"


class LlamaCppModel(Contender):
    """One model of the process."""

    def __init__(self, process: LlamaCpp, kind: str) -> None:
        self.name = f"llama.cpp {kind}"
        self._process = process
        self._kind = kind

    def hold(self, num_tokens: int) -> None:
        self._process.ask("hold", name=self._kind, tokens=num_tokens)

    def decode(self, num_steps: int) -> float:
        return self._seconds("decode", num_steps)

    def append(self, num_tokens: int) -> float:
        return self._seconds("append", num_tokens)

    def prefill(self, num_tokens: int) -> float:
        return self._seconds("prefill", num_tokens)

    def _seconds(self, action: str, num_tokens: int) -> float:
        return float(self._process.ask(action, name=self._kind, tokens=num_tokens)["seconds"])
