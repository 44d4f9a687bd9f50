"""What every connection and request of one server shares."""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from sampler.conversation import ConversationError
from sampler.engine import Engine
from sampler.local_engine import LocalEngine
from sampler.replay import Replays
from sampler.traces import Trace
from server.background import BackgroundRuns
from server.compaction import Compactor
from server.draining import Draining
from server.ledger import Ledger, check_ledger
from server.loop_lag import LoopLag
from server.memory import Memory
from server.model_routes import ResolvedModels
from server.operator_files import OperatorFiles
from server.post_inference import PostInference
from server.pre_inference import PreInference
from server.prices import Prices
from server.response_store import ResponseStore, check_store
from server.safety import Safety, load_classifier
from server.settings import Settings, SettingsError
from server.suspended_runs import SuspendedRuns
from server.telemetry import Telemetry
from server.work import Work

STORE_FILE = "responses.sqlite"

_MAX_KEYS = 16
"""Of how many keys the recent responses are kept: their caches are large."""
_TIDY_SECONDS = 15.0
"""How often caches that nobody came back for are looked for."""


class Services:
    """An engine, with the work before and after it, and what outlives a request."""

    def __init__(self, engine: Engine, settings: Settings, files: OperatorFiles) -> None:
        self.engine = engine
        self.settings = settings
        self.telemetry = Telemetry(engine)
        self.routes = files.routes
        self.safety = Safety(partial(load_classifier, settings.safety))
        self.compactor = Compactor(engine, self.telemetry)
        self.pre_inference = PreInference(
            engine,
            settings,
            self.telemetry,
            self.compactor,
            self.safety,
            _replays(files.traces, engine),
        )
        self.draining = Draining()
        self.background = BackgroundRuns()
        self.suspended = SuspendedRuns(settings.max_suspended_per_key)
        with ExitStack() as resources:
            resources.callback(self.safety.close)
            self.store = self._open_store(resources) if settings.store else None
            self.ledger = self._open_ledger(resources, files.prices) if settings.ledger else None
            self._resources = resources.pop_all()
        self.post_inference = PostInference(self.telemetry, self.ledger)
        self._loop_lag: LoopLag | None = None
        self._recent: OrderedDict[str, Memory] = OrderedDict()
        self._tidying: asyncio.TimerHandle | None = None  # begun with the first recent response

    def _open_store(self, resources: ExitStack) -> ResponseStore:
        store = ResponseStore(
            self._folder(resources) / STORE_FILE,
            self.settings.store_ttl_seconds,
            stages=self.telemetry.stages,
        )
        resources.callback(store.close)
        return store

    def _open_ledger(self, resources: ExitStack, prices: Prices) -> Ledger:
        ledger = Ledger(self._folder(resources), prices, stages=self.telemetry.stages)
        resources.callback(ledger.close)
        return ledger

    def _folder(self, resources: ExitStack) -> Path:
        """Return where files are kept, if only for as long as the process lives."""
        return self.settings.data_dir or Path(resources.enter_context(TemporaryDirectory()))

    def new_work(self) -> Work:
        """Return the work on a request that was received just now."""
        return Work(self.telemetry.stages)

    async def start(self) -> None:
        """Load what the first request would have to wait for, and see how the event loop does.

        Raises:
            ClassificationError: the classifier does not work.
        """
        self._loop_lag = LoopLag(self.telemetry.event_loop_lag.observe)
        if self.safety.is_on:
            await self.safety.warm_up()

    async def close(self) -> None:
        """End background runs, and let go of the files, and of what the engine has in the event
        loop. The engine stays its owner's to close."""
        await self.background.close()
        if self._loop_lag is not None:
            self._loop_lag.close()
        if self._tidying is not None:
            self._tidying.cancel()
        # Whoever still follows a response may hold on to the memory, but to nothing in it.
        for memory in self._recent.values():
            memory.forget_all()
        self._resources.close()
        await self.engine.stop()

    def connection_memory(self, key_id: str) -> Memory:
        """Return the memory of a new connection."""
        # What a client says on it goes one way, where it does not tell its conversations apart.
        models = ResolvedModels(self.routes, sticky=secrets.token_hex(16))
        return Memory(key_id, self.store, self.engine.name, models)

    def forgetful_memory(self, key_id: str) -> Memory:
        """Return the memory of a request that is to have none."""
        return self._http_memory(key_id, max_responses=0)

    def recent_responses(self, key_id: str) -> Memory:
        """Return what is kept of a key's recent responses over HTTP.

        Where none are to be kept, a request has a memory of its own: what it reads back from the
        store makes no difference to later ones.
        """
        max_responses = self.settings.recent_responses
        if max_responses == 0:
            return self.forgetful_memory(key_id)
        if key_id not in self._recent:
            self._recent[key_id] = self._http_memory(key_id, max_responses)
        self._recent.move_to_end(key_id)
        if self._tidying is None:
            self._tidy()
        if len(self._recent) > _MAX_KEYS:
            _, oldest = self._recent.popitem(last=False)
            oldest.forget_all()
        return self._recent[key_id]

    def _http_memory(self, key_id: str, max_responses: int) -> Memory:
        return Memory(
            key_id,
            self.store,
            self.engine.name,
            ResolvedModels(self.routes),
            max_responses=max_responses,
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


def check_storage(settings: Settings) -> None:
    """Make sure that ``Services`` can use the files in the data directory, and leave them as they
    are: no other server is using them, and nothing in them is damaged.

    Raises:
        StoreError: the response store cannot be opened.
        LedgerError: the ledger cannot be opened.
    """
    if settings.data_dir is None:
        return
    if settings.store:
        check_store(settings.data_dir / STORE_FILE)
    if settings.ledger:
        check_ledger(settings.data_dir)


def _replays(traces: Sequence[Trace], engine: Engine) -> Replays | None:
    if not traces:
        return None
    if not isinstance(engine, LocalEngine):
        raise SettingsError(f"{engine.name} is not sampled in this process: it replays no traces")
    try:
        return Replays(traces, engine.model.tokenizer, engine.model.chat_format)
    except ConversationError as error:
        raise SettingsError(f"{engine.name} cannot replay the traces: {error}") from error
