"""What every connection and request of one server shares."""

import asyncio
import time
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from sampler.engine import Engine
from server.background import BackgroundRuns
from server.compaction import Compactor
from server.draining import Draining
from server.memory import Memory
from server.post_inference import PostInference
from server.pre_inference import PreInference
from server.response_store import ResponseStore
from server.settings import Settings
from server.suspended_runs import SuspendedRuns
from server.telemetry import Telemetry

STORE_FILE = "responses.sqlite"

_MAX_KEYS = 16
"""Of how many keys the recent responses are kept: their caches are large."""
_TIDY_SECONDS = 15.0
"""How often caches that nobody came back for are looked for."""


class Services:
    """An engine, with the work before and after it, and what outlives a request."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.telemetry = Telemetry(engine)
        self.post_inference = PostInference(self.telemetry)
        self.compactor = Compactor(engine, self.telemetry)
        self.pre_inference = PreInference(engine, settings, self.telemetry, self.compactor)
        self.draining = Draining()
        self.background = BackgroundRuns()
        self.suspended = SuspendedRuns(settings.max_suspended_per_key)
        self._resources = ExitStack()
        self.store = self._open_store() if settings.store else None
        self._recent: OrderedDict[str, Memory] = OrderedDict()
        self._tidying: asyncio.TimerHandle | None = None  # begun with the first recent response

    def _open_store(self) -> ResponseStore:
        folder = self.settings.data_dir
        if folder is None:
            folder = Path(self._resources.enter_context(TemporaryDirectory()))
        store = ResponseStore(folder / STORE_FILE, self.settings.store_ttl_seconds)
        self._resources.callback(store.close)
        return store

    async def close(self) -> None:
        """End background runs and let go of the store. The engine stays its owner's to close."""
        await self.background.close()
        if self._tidying is not None:
            self._tidying.cancel()
        # Whoever still follows a response may hold on to the memory, but to nothing in it.
        for memory in self._recent.values():
            memory.forget_all()
        self._resources.close()

    def connection_memory(self, key_id: str) -> Memory:
        """Return the memory of a new connection."""
        return Memory(key_id, self.store, self.engine.model.name)

    def recent_responses(self, key_id: str) -> Memory:
        """Return what is kept of a key's recent responses over HTTP.

        Where none are to be kept, a request has a memory of its own: what it reads back from the
        store makes no difference to later ones.
        """
        if self.settings.recent_responses == 0:
            return self._http_memory(key_id)
        if key_id not in self._recent:
            self._recent[key_id] = self._http_memory(key_id)
        self._recent.move_to_end(key_id)
        if self._tidying is None:
            self._tidy()
        if len(self._recent) > _MAX_KEYS:
            _, oldest = self._recent.popitem(last=False)
            oldest.forget_all()
        return self._recent[key_id]

    def _http_memory(self, key_id: str) -> Memory:
        return Memory(
            key_id,
            self.store,
            self.engine.model.name,
            max_responses=self.settings.recent_responses,
            names_are_local=False,
        )

    def _tidy(self) -> None:
        """Let go of caches that nobody came back for, now and from time to time."""
        ttl = self.settings.suspend_ttl_seconds
        for memory in self._recent.values():
            memory.release_caches(time.monotonic() - ttl)
        # A timer and no task: it needs nobody to own it, and is not asked to end but dropped.
        loop = asyncio.get_running_loop()
        self._tidying = loop.call_later(min(ttl, _TIDY_SECONDS), self._tidy)

    def forget_response(self, key_id: str, response_id: str) -> None:
        """Keep nothing more of a response that was deleted."""
        if memory := self._recent.get(key_id):
            memory.forget(response_id, slot=response_id)
