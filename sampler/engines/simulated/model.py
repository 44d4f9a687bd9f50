"""A simulated accelerator: everything of a model but the model.

It has the interface, the tokenizer, the chat format, the cache and the speed of a real one, and no
weights. What it says is made up (``script``), from a hash of all that it has read. That hash is in
its cache and nowhere else (``chained_blocks``), so it tells a mistake in the handling of caches as
a model would, or sooner. Its steps take as long as they would at given rates (``pacer``).

It is for load tests, and to compare designs at speeds that are not at hand. Its name and a warning
in the log say that it is simulated, and whoever serves it can tell by ``is_simulated``.
"""

import logging
from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from sampler.cache_pool import BlockPool
from sampler.counters import Counters
from sampler.embedded_model import EMBEDDED_MODEL_NAME, Progress, ensure_embedded_model
from sampler.engines.simulated.chained_blocks import ChainedBlocks, CorruptCacheError, Link
from sampler.engines.simulated.pacer import Pacer
from sampler.engines.simulated.script import Place, Script, Speaker
from sampler.kv_cache import KVCache, KVShape, PagedCache, PagedStorage
from sampler.model_loading import LoadedModel, chat_format_of, stop_ids_of
from sampler.model_runner import ModelRunner, Piece
from sampler.sampling import Certain
from sampler.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


Caches = frozenset[ref[KVCache]]
"""Some that may be gone."""


class KVFormat(NamedTuple):
    """What is kept of each position."""

    shape: KVShape
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """What a block takes."""
        return self.shape.block_bytes(self.dtype)


SMALL_KV = KVFormat(KVShape(num_layers=1, num_kv_heads=1, head_dim=4), torch.float32)
"""As little as will do: 32 bytes a token."""

SMOLLM2_KV = KVFormat(KVShape(num_layers=30, num_kv_heads=3, head_dim=64), torch.bfloat16)
"""What SmolLM2-135M keeps: 22.5 KiB a token."""


class SimulatedRunner(ModelRunner):
    """Says a script at a given pace."""

    runs_ahead = True
    is_simulated = True

    def __init__(
        self,
        speaker: Speaker,
        storage: PagedStorage,
        pacer: Pacer,
        *,
        vocab_size: int,
        max_context: int,
        counters: Counters | None = None,
    ) -> None:
        """Let ``speaker`` speak.

        Args:
            speaker: what it says.
            storage: of the blocks of all caches, in main memory.
            pacer: how long it takes.
            vocab_size: logits per position.
            max_context: the most positions.
            counters: where the work is counted.
        """
        super().__init__(counters)
        self._speaker = speaker
        self._storage = storage
        self._blocks = ChainedBlocks(storage)
        self._pacer = pacer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._last: Caches = frozenset()  # of the last step
        self._unfinished: Caches = frozenset()  # of the prompts in it of which more is to come

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._storage.shape}, {self._storage.tensor.dtype})"

    @property
    def device(self) -> torch.device:
        return self._storage.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.tensor.dtype

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    def new_cache(self) -> PagedCache:
        return self._storage.new_cache()

    def reserve_memory(self) -> None:
        self._storage.reserve()

    def find_prefix(self, salt: Hashable, token_ids: Sequence[int]) -> PagedCache | None:
        cache = self._storage.match(salt, token_ids, len(token_ids) - 1)
        return cache if cache.num_tokens else None

    def publish(self, salt: Hashable, token_ids: Sequence[int], cache: KVCache) -> None:
        _paged(cache).publish(salt, token_ids)

    def forward(self, pieces: Sequence[Piece]) -> list[Certain | None]:
        """Read ``pieces``, in the time that it takes, and return what is said next.

        Raises:
            OutOfBlocksError: as in any runner.
            CorruptCacheError: one of the caches is broken: it does not hold what was written to it.
        """
        if not pieces:
            return []
        self._pacer.begin_step(goes_on=any(map(self._goes_on, pieces)))
        self._last = frozenset(ref(piece.cache) for piece in pieces)
        self._unfinished = frozenset(ref(piece.cache) for piece in pieces if not piece.wants_logits)
        caches = [_paged(piece.cache) for piece in pieces]
        lengths = [len(piece.token_ids) for piece in pieces]
        for cache, length in zip(caches, lengths, strict=True):
            cache.extend_to(length)
        read = [
            self._read(piece.token_ids, cache) for piece, cache in zip(pieces, caches, strict=True)
        ]
        self._blocks.write((cache, links) for cache, (links, _) in zip(caches, read, strict=True))
        for cache, length in zip(caches, lengths, strict=True):
            cache.advance(length)
        self.counters.forward_passes += 1
        self.counters.tokens_forwarded += sum(lengths)
        self._pacer.end_step(sum(length for length in lengths if length > 1))
        return [
            self._say(links[-1], place) if piece.wants_logits else None
            for piece, (links, place) in zip(pieces, read, strict=True)
        ]

    def _goes_on(self, piece: Piece) -> bool:
        """Tell whether ``piece`` is what the last step led to: the token that was sampled, or the
        next chunk of a prompt. The outputs of a call have been waited for."""
        among = self._last if len(piece.token_ids) == 1 else self._unfinished
        return ref(piece.cache) in among

    def _read(self, token_ids: Sequence[int], cache: PagedCache) -> tuple[Sequence[Link], Place]:
        """Return what is to be kept of ``token_ids``, behind what ``cache`` holds, and where in the
        script that leads to."""
        try:
            if len(token_ids) > 1:
                self._blocks.check_all(cache)
            link = self._blocks.last(cache)
        except CorruptCacheError:
            cache.is_broken = True
            raise
        place = Place.unpack(link.place)
        links: list[Link] = []
        for token_id in token_ids:
            place = self._speaker.after(place, token_id)
            link = Link(link.chain_after(token_id), place.pack(), token_id)
            links.append(link)
        return links, place

    def _say(self, link: Link, place: Place) -> Certain:
        logits = partial(self._speaker.logits, place, link.chain, link.token_id)
        return Certain(self._speaker.next(place, link.chain), logits)


def simulated_model(
    decode_rate: float | None = None,
    prefill_rate: float | None = None,
    *,
    script: Script = Script(),  # noqa: B008 - frozen
    kv_format: KVFormat = SMALL_KV,
    kv_memory: int = 1 << 30,
    progress: Progress | None = None,
) -> LoadedModel:
    """Return a simulated model that speaks the language and the chat format of the embedded one.

    Args:
        decode_rate: tokens a second of each sequence; None for as fast as can be.
        prefill_rate: tokens of prompts a second, of all sequences together; None likewise.
        script: what it says.
        kv_format: what it keeps of each position.
        kv_memory: bytes for that; what is not used is not resident.
        progress: called with (done, total) while the embedded model is converted, on first use.

    Raises:
        EmbeddedModelError: the embedded model, whose tokenizer it is, is not installed.
        ValueError: the memory does not hold a single block.
    """
    num_blocks = kv_memory // kv_format.block_bytes
    if num_blocks == 0:
        raise ValueError(f"{kv_memory} bytes do not hold a block of {kv_format.block_bytes}")
    directory = ensure_embedded_model(progress)
    config = AutoConfig.from_pretrained(directory)
    hf_tokenizer = AutoTokenizer.from_pretrained(directory)
    stop_ids = stop_ids_of(GenerationConfig.from_pretrained(directory), hf_tokenizer)
    tokenizer = Tokenizer(hf_tokenizer.backend_tokenizer, stop_ids, config.vocab_size)
    chat_format = chat_format_of(hf_tokenizer, tokenizer, EMBEDDED_MODEL_NAME)
    header = [tokenizer.added_tokens["<|im_start|>"], *tokenizer.encode_text("assistant\n")]
    runner = SimulatedRunner(
        Speaker(tokenizer, script, header, chat_format.end_of_turn),
        PagedStorage(BlockPool(num_blocks), kv_format.shape, kv_format.dtype),
        Pacer(decode_rate, prefill_rate),
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
    )
    tokenizer.counters = runner.counters
    name = simulated_name(decode_rate)
    logger.warning("%s is simulated: there is no model, and what it says is made up", name)
    return LoadedModel(name, runner, tokenizer, chat_format)


def simulated_name(decode_rate: float | None) -> str:
    """Return what clients call the model that is simulated at ``decode_rate``."""
    return f"simulated-{decode_rate:g}" if decode_rate else "simulated-unlimited"


def _paged(cache: KVCache) -> PagedCache:
    assert isinstance(cache, PagedCache), "a cache comes from the runner that it is used by"
    return cache
