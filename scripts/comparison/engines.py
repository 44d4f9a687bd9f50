"""What the designs are compared on: servers of this project, one for each engine, started once.

An engine may be somewhere else: then the server samples at an endpoint for chat completions, and
it is up to that endpoint to say what the traces say.
"""

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2

from sampler.traces import Trace, write_traces
from scripts.benchmarks.served import Served, serving
from scripts.comparison.agents import TIMEOUT_SECONDS, Endpoint
from server.access import add_api_key

_PREFILL_TO_DECODE = 20
"""How much faster a simulated accelerator reads than it writes: as an accelerator does that decodes
for one client, and prefills in chunks of hundreds."""
_KV_GIB = 1
"""Of each server, taken from the system at its start: or whoever is first to use a block would be
charged for it."""
_RECENT_RESPONSES = 64
"""That stateless clients can go on from: four for each of the most agents at once."""


def simulated(rate: float) -> str:
    """Return the name of the engine that samples ``rate`` tokens a second."""
    return f"simulated {rate:g}"


ENGINES: dict[str, tuple[str, ...]] = {
    "int4": ("--dtype", "int4"),
    "float32": ("--exact",),
    **{
        simulated(rate): (
            *("--simulate", f"{rate}"),
            *("--simulate-prefill", f"{rate * _PREFILL_TO_DECODE}"),
        )
        for rate in (65, 1000, 4000)
    },
}
"""Options of the server by the engine's name. All but the simulated ones run the embedded model."""


@dataclass(frozen=True)
class RemoteModel:
    """A model at an endpoint for chat completions; its key is in ``OPENAI_API_KEY``."""

    url: str
    """What ``/chat/completions`` is joined to."""
    name: str

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return f"endpoint {self.name}"

    @property
    def options(self) -> tuple[str, ...]:
        """Those of the server."""
        return ("--model", f"openai-chat:{self.name}", "--endpoint", self.url)


@dataclass(frozen=True)
class Server:
    """A server that listens."""

    engine: str
    served: Served
    endpoint: Endpoint


class Servers:
    """Servers by engine. Each is started when it is first asked for, and all are stopped together.

    All have what they have in service: API keys, a safety classifier, a ledger.
    """

    def __init__(
        self,
        traces: Iterable[Trace],
        options: Sequence[str] = (),
        remote: RemoteModel | None = None,
    ) -> None:
        """Start none yet.

        Args:
            traces: that can be replayed on each of them that samples itself.
            options: of all those, after those that are theirs.
            remote: what is sampled somewhere else, if anything is.
        """
        self._traces = {trace.name: trace for trace in traces}
        self._options = tuple(options)
        self._remote = remote
        self._servers: dict[str, Server] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop those that were started. Who is asked for again is started anew."""
        self._servers.clear()
        self._stack.close()

    def options(self, engine: str) -> list[str]:
        """Return the options that the server of ``engine`` is started with, but for its files."""
        around = ("--safety", "embedded", "--recent-responses", str(_RECENT_RESPONSES))
        if (remote := self._remote_of(engine)) is not None:
            return [*remote.options, *around]
        kv = ("--kv-memory", str(_KV_GIB), "--reserve-kv")
        return [*ENGINES[engine], *around, *kv, *self._options]

    def _remote_of(self, engine: str) -> RemoteModel | None:
        is_remote = self._remote is not None and self._remote.engine == engine
        return self._remote if is_remote else None

    async def get(self, engine: str) -> Server:
        """Return the server of ``engine``, which listens.

        Raises:
            ServerError: it does not start; it has said why on standard error.
        """
        if engine not in self._servers:
            self._servers[engine] = await self._start(engine)
        return self._servers[engine]

    async def _start(self, engine: str) -> Server:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        options = [*self.options(engine), "--data-dir", str(folder / "data")]
        if self._traces and self._remote_of(engine) is None:
            write_traces(folder / "traces.jsonl", self._traces.values())
            options += ["--replay", str(folder / "traces.jsonl")]
        api_key = add_api_key(folder / "keys", "compare")
        options += ["--api-key-file", str(folder / "keys")]
        served = self._stack.enter_context(serving(options))
        port = await asyncio.to_thread(lambda: served.port)
        url = f"http://127.0.0.1:{port}"
        return Server(engine, served, Endpoint(url, await _model(url, api_key), api_key))


async def _model(url: str, api_key: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"}
    async with new_client() as client:
        reply = await client.get(f"{url}/v1/models", headers=headers)
        reply.raise_for_status()
        name: str = reply.json()["data"][0]["id"]
    return name


def new_client() -> httpx2.AsyncClient:
    """Return a client for what is asked of a server beside what is measured."""
    # Nothing is encrypted, and certificates take long to load.
    return httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=False)
