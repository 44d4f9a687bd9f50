"""What a connection remembers of its responses, or, over HTTP, what a key's recent ones left.

A connection keeps the latest response of each lane, and nothing of it ever leaves the connection
(WebSocket events reference, connection-local cache). Besides it a lane's latest warm-up is kept: it
was made to be followed, and may be more than once. Over HTTP the last few responses of a key are
kept only to spare their followers the prefill: what an id names there is the store's business.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from protocol import errors
from protocol.codec import decode_object
from protocol.items import InputItem, ItemReference
from sampler.echoes import TurnIndex
from sampler.prompt import Prompt
from sampler.recorded_turn import Item, TurnItem, expanded
from sampler.snapshot import Sources
from server.model_routes import ResolvedModels
from server.past_response import PastResponse, unpack
from server.response_store import ResponseStore, StoredResponse

_MAX_VAIN_LOOKUPS = 8
"""How many ids may be unknown to the store too before no more of a history are looked up."""


class _Place(NamedTuple):
    """Where a response is kept."""

    slot: Hashable
    is_for_warm_ups: bool


class Memory:
    """Past responses by slot: a lane's name, or over HTTP a response's own id.

    A slot holds one response, and one that was only warmed up.
    """

    def __init__(
        self,
        key_id: str,
        store: ResponseStore | None,
        model: str,
        models: ResolvedModels,
        *,
        max_responses: int | None = None,
        names_are_local: bool = True,
    ) -> None:
        """Begin with nothing.

        Args:
            key_id: whose stored responses can be seen.
            store: where responses are that were asked to be stored, if there is a store.
            model: the model whose token ids mean something here.
            models: what the names of models were found to mean.
            max_responses: how many are kept; None for what the slots hold. Where it is none,
                histories are not looked up in the store either.
            names_are_local: whether ids name what is kept here, stored or not.
        """
        self.key_id = key_id
        self.models = models
        self._store = store
        self._model = model
        self._max_responses = max_responses
        self.names_are_local = names_are_local
        self._kept: OrderedDict[_Place, PastResponse] = OrderedDict()
        self._turns = TurnIndex()
        self.on_forget: Callable[[PastResponse], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._kept)

    # --- Finding ----------------------------------------------------------------------------------

    def latest(self, slot: Hashable) -> PastResponse | None:
        """Return the response in ``slot``, if something was sampled there."""
        return self._kept.get(_Place(slot, is_for_warm_ups=False))

    def find(self, response_id: str) -> PastResponse | None:
        """Return a response that is kept here, whether its id may be named or not."""
        return next((past for past in self._kept.values() if past.id == response_id), None)

    async def parent(self, response_id: str) -> PastResponse:
        """Return the response that ``previous_response_id`` names.

        Raises:
            ProtocolError: ``previous_response_not_found``, as there is no silent new start, or
                ``response_in_progress``.
        """
        kept = self.find(response_id)
        if kept is not None and self.names_are_local:
            return kept
        stored = await self._stored(response_id)
        if stored is None or stored.is_refused:
            raise errors.previous_response_not_found(response_id)
        if not stored.is_finished:
            raise errors.response_in_progress(response_id)
        return kept or self._read_back(stored)

    async def model_of(self, response_id: str) -> str | None:
        """Return the model that a response says it is of, if the response is kept or stored."""
        kept = self.find(response_id)
        if kept is not None and kept.params is not None:
            return kept.params.model
        stored = await self._stored(response_id)
        return None if stored is None else str(decode_object(stored.response)["model"])

    async def _stored(self, response_id: str) -> StoredResponse | None:
        return await self._store.get(self.key_id, response_id) if self._store else None

    def _read_back(self, stored: StoredResponse) -> PastResponse:
        items: Sequence[Item] = unpack(stored.conversation)
        if stored.model != self._model:
            items = expanded(items)  # the tokens are another model's
        response = decode_object(stored.response)
        self._turns.add(items, response["instructions"])
        wire_items = [*stored.input_items, *response["output"]]
        return PastResponse(stored.id, items, wire_items)

    async def resolve(self, items: Iterable[InputItem]) -> list[InputItem]:
        """Return ``items`` with what references name in their place.

        Raises:
            ProtocolError: ``item_not_found``.
        """
        return [
            await self._item(item) if isinstance(item, ItemReference) else item for item in items
        ]

    async def _item(self, reference: ItemReference) -> InputItem:
        if self.names_are_local and (item := self._turns.item(reference.id)):
            return item
        if self._store and (stored := await self._store.get_by_item(self.key_id, reference.id)):
            self._read_back(stored)
            for item in expanded(unpack(stored.conversation)):
                if getattr(item, "id", None) == reference.id:
                    return item
        raise errors.item_not_found(reference.id, reference.param)

    async def recognise(self, items: Sequence[Item], instructions: str | None) -> list[Item]:
        """Return a conversation with the turns sampled here in the place of their echoes.

        Those that are stored are known by the ids of their items.
        """
        if self._store and self._max_responses != 0:
            await self._look_up(self._store, items)
        return self._turns.recognise(items, instructions)

    async def _look_up(self, store: ResponseStore, items: Sequence[Item]) -> None:
        """Read back the stored responses that ``items`` repeat and that are not known here."""
        said = [item.id for item in items if isinstance(item, TurnItem) and item.id is not None]
        num_vain = 0
        # The last response has the whole conversation, so the ids before it are then known.
        for item_id in reversed(dict.fromkeys(said)):
            if self._turns.item(item_id):
                continue
            if stored := await store.get_by_item(self.key_id, item_id):
                self._read_back(stored)
            num_vain += self._turns.item(item_id) is None
            if num_vain == _MAX_VAIN_LOOKUPS:
                return

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that a new one may go on from."""
        return [past.prompt for past in self._kept.values() if past.prompt]

    @property
    def sources(self) -> Sources:
        """What a new run may start from: caches of past responses, and prompts of the same key that
        begin alike. Where no responses are kept, nothing at all."""
        snapshots = [past.snapshot for past in self._kept.values() if past.snapshot]
        return Sources(snapshots, self.key_id, reuses_prefixes=self._max_responses != 0)

    # --- Keeping and forgetting -------------------------------------------------------------------

    def keep(self, slot: Hashable, past: PastResponse) -> None:
        """Keep ``past`` as the latest of its kind in ``slot``."""
        if self._max_responses == 0:
            return
        place = _Place(slot, past.is_warm_up)
        self._clear(place)
        self._kept[place] = past
        self._turns.add(past.items, past.params.instructions if past.params else None)
        while self._max_responses is not None and len(self._kept) > self._max_responses:
            self._clear(next(iter(self._kept)))

    def forget(self, response_id: str, slot: Hashable) -> None:
        """Forget a response, if it is in ``slot``."""
        for place, past in list(self._kept.items()):
            if past.id == response_id and place.slot == slot:
                self._clear(place)

    def forget_all(self) -> None:
        """Forget everything."""
        for place in list(self._kept):
            self._clear(place)

    def _clear(self, place: _Place) -> None:
        if (past := self._kept.pop(place, None)) is not None:
            self.on_forget(past)

    def release_caches(self, older_than: float) -> None:
        """Let go of the caches of responses that have rested since before ``older_than``."""
        for place, past in self._kept.items():
            if past.snapshot and past.rested_at < older_than:
                self._kept[place] = replace(past, snapshot=None)
