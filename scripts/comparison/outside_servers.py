"""The servers of others that run the embedded model: how to ask them, and which are there."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sampler.embedded_model import ensure_embedded_model, published_weights
from scripts.comparison.outside_steps import Load, load_of
from scripts.comparison.workloads import Workload

JsonObject = dict[str, Any]

CONTEXT_TOKENS = 8192
"""Of the embedded model."""
_KV_BYTES = 30 * 2 * 3 * 64 * 2
"""Of one of its positions, in 16 bits: layers, keys and values, heads, sizes of heads."""
_END_OF_TEXT, _END_OF_TURN = 0, 2
_NEVER_SAMPLED = 49151
"""The last and rarest token of the vocabulary: an end of turn that does not come."""


class BaselineError(RuntimeError):
    """An outside server is not there or does not do what it was asked for; the message says why."""


@dataclass(frozen=True)
class OutsideServer:
    """How a server is started, asked and read."""

    name: str
    engine: str
    """The format of the weights."""
    model: str
    """What a request calls it."""
    command: Sequence[str]
    """Whoever is started by it says on standard error where it listens, in the words of uvicorn."""
    members: Callable[[int], JsonObject]
    """Returns what a request for so many tokens has beside the model and the messages."""
    prefix_match: re.Pattern[str]
    """What it writes on standard error where it reuses a prefix: ``cached`` tokens, and either the
    id of the ``request`` or how many tokens are the ``rest`` of the prompt."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that count where ours has none of the name."""
    notes: Sequence[str] = ()
    """What it does otherwise than ours."""


def llama_cpp_server(python: Path, threads: int, load: Load) -> OutsideServer:
    """Return ``llama_cpp.server`` on the weights of the embedded model as they were published.

    It keeps one context, that of the request it answered last. For several runs at once it is made
    to keep copies of others, at the price of a copy for each turn. A copy also has the logits of a
    whole batch, which count for nothing in the size of the cache, so batches are small then.

    Raises:
        BaselineError: the weights are not installed.
    """
    weights = str(published_weights())
    arguments = _arguments(
        {
            "model": weights,
            "host": "127.0.0.1",
            "port": 0,
            "n_ctx": CONTEXT_TOKENS,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn": "true",
            "logits_all": "false",  # by default it computes those of each token of a prompt
            "interrupt_requests": "false",  # by default a request breaks off the one before it
            **(_cache_of_copies(load) if load.concurrency > 1 else {}),
        }
    )
    return OutsideServer(
        name="llama.cpp server",
        engine="Q4_1",
        model=weights,
        command=[str(python), "-P", "-m", "llama_cpp.server", *arguments],
        members=lambda num_tokens: {
            "max_tokens": num_tokens,
            "repeat_penalty": 1.0,
            "logit_bias": {str(_END_OF_TEXT): -100, str(_END_OF_TURN): -100},
        },
        prefix_match=re.compile(r"(?P<cached>\d+) prefix-match hit, remaining (?P<rest>\d+)"),
        notes=[
            "llama.cpp server answers one request at a time. Its cached tokens are taken from its "
            "log. Ends of turns are ruled out by a bias, which its Python code applies for each "
            "token."
        ],
    )


def _cache_of_copies(load: Load) -> dict[str, object]:
    # Of each run two are in use: the one that its turn begins with, and the one that it leaves.
    return {"cache": "true", "cache_size": 2 * load.num_tokens * _KV_BYTES, "n_batch": 128}


_TRANSFORMERS = """
import logging
from transformers.cli.transformers import main
log = logging.getLogger("ContinuousBatchingLogger")
log.addFilter(lambda record: record.levelno > 20 or "prefix match" in record.getMessage())
log.setLevel(logging.DEBUG)
main()
"""


def transformers_server(python: Path, threads: int, load: Load) -> OutsideServer:
    """Return ``transformers serve`` on the embedded model.

    Only with continuous batching has it a prefix cache. It is given room for all runs and one more,
    in pages as small as ours. It takes its threads from the environment.
    """
    directory = str(ensure_embedded_model())
    page_tokens = 16
    arguments = _arguments(
        {
            "host": "127.0.0.1",
            "port": 0,
            "device": "cpu",
            "dtype": "bfloat16",
            "cb-block-size": page_tokens,
            "cb-num-blocks": -(-load.num_tokens // page_tokens),
            "cb-max-batch-tokens": 2048,
        }
    )
    command = [str(python), "-P", "-c", _TRANSFORMERS, "serve", directory]
    return OutsideServer(
        name="transformers serve",
        engine="bfloat16",
        model=directory,
        command=[*command, "--continuous-batching", *arguments],
        members=lambda num_tokens: {
            "max_tokens": num_tokens,
            "generation_config": json.dumps({"do_sample": False, "eos_token_id": _NEVER_SAMPLED}),
        },
        prefix_match=re.compile(
            r"Found a prefix match of (?P<cached>\d+) tokens for request (?P<request>\S+)"
        ),
        # Threads that spin at a barrier kept the last one off the processor, beside two busy
        # processes for ten seconds a turn and more; sleeping ones took two.
        environment={"OMP_WAIT_POLICY": "passive"},
        notes=[
            "transformers serve runs with continuous batching, without which it has no prefix "
            "cache. Its cached tokens are taken from its log. Its threads sleep where they wait "
            "for each other (OMP_WAIT_POLICY)."
        ],
    )


def _arguments(options: Mapping[str, object]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


# --- What is installed ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Package:
    """What a server comes in."""

    server: str
    name: str
    extra: str
    modules: tuple[str, ...]
    """Some of those that it needs, by which it is seen whether the extra is there."""


_LLAMA_CPP = _Package(
    server="llama.cpp server",
    name="llama-cpp-python",
    extra="server",
    modules=("llama_cpp", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
)
_TRANSFORMERS_SERVE = _Package(
    server="transformers serve",
    name="transformers",
    extra="serving",
    modules=("transformers", "torch", "fastapi", "uvicorn", "openai", "pydantic"),
)

_PROBE = """
import importlib.metadata, importlib.util, json, sys
package, *modules = sys.argv[1:]
missing = [name for name in modules if importlib.util.find_spec(name) is None]
version = "" if missing else importlib.metadata.version(package)
print(json.dumps({"missing": missing, "version": version}))
"""


class _Probe(Struct, frozen=True):
    missing: list[str]
    version: str


@dataclass(frozen=True)
class Installed:
    """The servers that can be started."""

    servers: list[OutsideServer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Which are left out, why, and how to have them."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of their packages, by the name of the server."""


def installed_servers(
    workload: Workload,
    *,
    threads: int,
    llama_cpp_python: Path | None = None,
    transformers_python: Path | None = None,
) -> Installed:
    """Return the servers that the interpreters have, made for ``workload``.

    Args:
        workload: they get room for it.
        threads: that each computes with.
        llama_cpp_python: an interpreter; None is this one, for it may have the package too.
        transformers_python: the same.
    """
    found = Installed()
    load = load_of(workload)
    ways = (
        (_LLAMA_CPP, llama_cpp_python, llama_cpp_server),
        (_TRANSFORMERS_SERVE, transformers_python, transformers_server),
    )
    for package, given, server in ways:
        python = given or Path(sys.executable)
        try:
            version = _version(package, python)
            found.servers.append(server(python, threads, load))
        except BaselineError as error:
            found.notes.append(f"{package.server} is left out: {error}")
        else:
            found.versions[package.server] = f"{package.name} {version}"
    return found


def _version(package: _Package, python: Path) -> str:
    """Return the version of ``package`` that ``python`` has, with its extra.

    Raises:
        BaselineError: it has not.
    """
    command = [str(python), "-P", "-c", _PROBE, package.name, *package.modules]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BaselineError(f"{python} cannot be asked what it has: {error}") from error
    probe = msgspec.json.decode(run.stdout, type=_Probe)
    if probe.missing:
        raise BaselineError(
            f"{python} has no {', '.join(probe.missing)}. Into an environment of its own: "
            f"pip install '{package.name}[{package.extra}]'; "
            f"then name its interpreter with --{package.name.removesuffix('-python')}-python."
        )
    return probe.version
