"""vLLM's engine core, as a fake: its scheduler, its blocks, its batch, and a model of hashes.

One call of ``step`` is one step of the model. What the real one does to a session was read in its
source (0.32.0) and tried, and is done here in the same way:

- The last token of a turn never entered the cache. When the next chunk arrives it is forgotten: who
  wants it in the context sends it again, at the head of the chunk.
- A session between two chunks keeps its blocks and its place among ``max_num_seqs``. Nobody can
  take them away. So those who need blocks wait, for ever if need be: that is the deadlock.
- Params are of the chunk, and penalties count what the chunk sampled. But the seed and
  ``structured_outputs`` are those of the first chunk and of no other.
- Logits processors see a continued session as a new one in the batch, with the params of the chunk,
  the whole context as its prompt, and nothing sampled yet.
- A chunk that takes the session over ``max_model_len`` kills the engine.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tests.sampler.engines.vllm_types import (
    AddedRequest,
    BatchUpdate,
    EngineDeadError,
    LogitsProcessor,
    Logprob,
    MoveDirectionality,
    SamplingParams,
)

Model: TypeAlias = Callable[[Sequence[int]], Tensor]
"""From a context to the logits of what comes next, ``(vocab,)`` float32."""

_CERTAIN = 1e4


def hash_model(vocab_size: int) -> Model:
    """Return a model whose logits are noise, keyed by all of the context."""

    def logits(token_ids: Sequence[int]) -> Tensor:
        digest = blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
        noise = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        return torch.from_numpy(noise.standard_normal(vocab_size, dtype=np.float32))

    return logits


class Status(Enum):
    """Where a request is."""

    WAITING = auto()
    WAITING_FOR_STREAMING_REQ = auto()
    RUNNING = auto()


@dataclass(frozen=True)
class Chunk:
    """What arrives at the core: the ids and params of a request, or of a session's next turn."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    is_resumable: bool
    salt: str = ""
    """Only those who have the same find one another's blocks."""


@dataclass(frozen=True)
class CoreOutput:
    """What a step gave one request."""

    request_id: str
    token_id: int
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    stop_reason: int | None
    is_finished: bool
    """Whether the core has done with the request; a session is not, at the end of a turn."""
    num_cached_tokens: int
    """What the prefix cache had of the first chunk."""


@dataclass(eq=False)
class _Request:
    id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    is_resumable: bool
    generator: np.random.Generator | None
    grammar: deque[int]
    salt: str
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    chunks: deque[Chunk | None] = field(default_factory=deque)
    script: deque[int] | None = None
    num_cached: int | None = None
    stop_reason: int | None = None


class BlockPool:
    """Blocks of the cache. What nobody holds any more can still be found by what it holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Return the blocks that hold the longest prefix, short of the last token."""
        found = []
        for key in self._keys(token_ids[:-1], salt):
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def take(self, num_new: int, known: Sequence[int] = ()) -> list[int] | None:
        """Return ``known`` and so many new blocks, held once more, or None if there are too few."""
        if num_new > self.num_free - sum(block in self._free for block in known):
            return None
        for block in known:
            self._free.pop(block, None)
        new = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for block in new:
            if key := self._key_of.pop(block, None):
                del self._block_of[key]
        for block in (*known, *new):
            self._holders[block] += 1
        return [*known, *new]

    def remember(self, token_ids: Sequence[int], blocks: Sequence[int], salt: str) -> None:
        """Let those of ``blocks`` that ``token_ids`` fill be found."""
        for key, block in zip(self._keys(token_ids, salt), blocks, strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key

    def give_back(self, blocks: Sequence[int]) -> None:
        """Hold ``blocks`` no more. The last of them is the first to be used for something else."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def _keys(self, token_ids: Sequence[int], salt: str) -> Iterable[bytes]:
        key = salt.encode()
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block = np.asarray(token_ids[end - self.block_size : end], dtype=np.int64)
            key = blake2b(key + block.tobytes(), digest_size=16).digest()
            yield key


class FakeEngineCore:
    """Requests and sessions in, tokens out."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        processors: Sequence[LogitsProcessor],
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.turns: deque[Sequence[int]] = deque()
        """What the next turns that begin are going to say, before the model says more."""
        self.eos_id: int | None = None
        """What ends a turn too, unless the turn's params ignore it."""
        self.dies_of_empty_turns = False
        """Whether a continued session whose first token is a stop kills the engine (0.25.1)."""
        self.prefilled: dict[str, list[int]] = {}
        """How many tokens of each chunk were forwarded, by request; not what was sampled."""
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._processors = processors
        self._requests: dict[str, _Request] = {}
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._batch = _Batch()

    @property
    def num_running(self) -> int:
        """How many requests are being sampled."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many would like to be."""
        return len(self._waiting) - self.num_paused

    @property
    def num_paused(self) -> int:
        """How many sessions wait for their next chunk."""
        return sum(r.status is Status.WAITING_FOR_STREAMING_REQ for r in self._waiting)

    def add(self, request_id: str, chunk: Chunk | None) -> None:
        """Take a request, or a session's next chunk, or None for a session that has no more."""
        session = self._requests.get(request_id)
        if session is None:
            assert chunk is not None
            self._begin(request_id, chunk)
        elif session.status is not Status.WAITING_FOR_STREAMING_REQ:
            session.chunks.append(chunk)
        elif chunk is None:
            self.abort(request_id)
        else:
            self._continue(session, chunk)

    def _begin(self, request_id: str, chunk: Chunk) -> None:
        params, seed = chunk.params, chunk.params.seed
        generator = None if seed is None else np.random.Generator(np.random.Philox(seed))
        request = _Request(
            id=request_id,
            params=params,
            token_ids=list(chunk.token_ids),
            num_prompt_tokens=len(chunk.token_ids),
            is_resumable=chunk.is_resumable,
            generator=generator if params.temperature else None,
            grammar=deque(params.structured_outputs or ()),
            salt=chunk.salt,
        )
        self._requests[request_id] = request
        self._waiting.append(request)
        self.prefilled[request_id] = [0]

    def _continue(self, session: _Request, chunk: Chunk) -> None:
        del session.token_ids[session.num_computed :]
        session.token_ids += chunk.token_ids
        session.num_prompt_tokens = len(session.token_ids)
        session.output_ids.clear()
        session.params = chunk.params
        session.script = None
        session.status = Status.WAITING
        self._batch.forget(session)
        self.prefilled[session.id].append(0)

    def abort(self, request_id: str) -> None:
        """Have done with a request, if there is one of that id. Its blocks can still be found."""
        if request := self._requests.pop(request_id, None):
            for queue in (self._waiting, self._running):
                if request in queue:
                    queue.remove(request)
            self.pool.give_back(request.blocks)

    def forget_prefixes(self) -> bool:
        """Have no block found any more, and tell whether that could be done."""
        if any(request.blocks for request in self._requests.values()):
            return False
        self.pool = BlockPool(self.pool.num_free, self.pool.block_size)
        return True

    def step(self) -> list[CoreOutput] | None:
        """Run the model for those whose turn it is; None if there is nobody who could be run.

        Raises:
            EngineDeadError: that was the end of it.
        """
        scheduled = self._schedule()
        if not scheduled:
            return None
        for request, num_new in scheduled.items():
            self._forward(request, num_new)
        raw, processed = self._logits(list(scheduled))
        return [
            self._sample(request, raw[row], processed[row])
            for row, request in enumerate(self._batch.requests)
            if request.num_computed == len(request.token_ids)
        ]

    def _schedule(self) -> dict[_Request, int]:
        """Return how many tokens of which request are forwarded in this step."""
        scheduled: dict[_Request, int] = {}
        budget = self._max_num_batched_tokens
        is_short = False
        for request in list(self._running):
            num_new = min(len(request.token_ids) - request.num_computed, budget)
            while request in self._running and not self._allocate(request, num_new):
                is_short = True
                budget += scheduled.pop(self._preempt(), 0)
            if request in self._running and num_new:
                scheduled[request] = num_new
                budget -= num_new
        if not is_short:
            self._admit(scheduled, budget)
        return scheduled

    def _admit(self, scheduled: dict[_Request, int], budget: int) -> None:
        """Let those in who wait, those first who hold blocks; nobody overtakes who has to wait."""
        ready = [r for r in self._waiting if r.status is Status.WAITING]
        for request in sorted(ready, key=lambda request: not request.blocks):
            if not budget or len(self._running) + self.num_paused >= self._max_num_seqs:
                break
            num_new = self._enter(request, budget)
            if not num_new:
                break
            self._waiting.remove(request)
            self._running.append(request)
            request.status = Status.RUNNING
            scheduled[request] = num_new
            budget -= num_new

    def _enter(self, request: _Request, budget: int) -> int:
        """Give ``request`` its blocks and return how many tokens it may forward, or 0."""
        known = [] if request.blocks else self.pool.find(request.token_ids, request.salt)
        num_known = request.num_computed + len(known) * self.pool.block_size
        num_new = min(len(request.token_ids) - num_known, budget)
        num_blocks = self._num_blocks(num_known + num_new) - len(request.blocks) - len(known)
        if (blocks := self.pool.take(num_blocks, known)) is None:
            return 0
        request.blocks += blocks
        request.num_computed = num_known
        if request.num_cached is None:
            request.num_cached = num_known
        return num_new

    def _allocate(self, request: _Request, num_new: int) -> bool:
        num_blocks = self._num_blocks(request.num_computed + num_new) - len(request.blocks)
        if (blocks := self.pool.take(num_blocks)) is None:
            return False
        request.blocks += blocks
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _preempt(self) -> _Request:
        """Send the youngest of those that run back to wait, without its cache, and return it."""
        victim = self._running.pop()
        self.pool.give_back(victim.blocks)
        victim.blocks.clear()
        victim.num_computed = 0
        victim.status = Status.WAITING
        self._waiting.insert(0, victim)
        return victim

    def _forward(self, request: _Request, num_new: int) -> None:
        if request.num_prompt_tokens > self._max_model_len:
            raise EngineDeadError("could not broadcast input array")
        num_prompt = min(request.num_prompt_tokens - request.num_computed, num_new)
        self.prefilled[request.id][-1] += max(num_prompt, 0)
        request.num_computed += num_new
        known = request.token_ids[: request.num_computed]
        self.pool.remember(known, request.blocks, request.salt)

    def _logits(self, scheduled: Sequence[_Request]) -> tuple[Tensor, Tensor]:
        """Return the batch's logits, ``(rows, vocab)``, and what the processors make of them."""
        update = self._batch.update(scheduled)
        for processor in self._processors:
            processor.update_state(update)
        raw = torch.stack([self._row(request) for request in self._batch.requests])
        logits = raw.clone()
        for processor in self._processors:
            logits = processor.apply(logits)
        return raw, logits

    def _row(self, request: _Request) -> Tensor:
        logits = self._model(request.token_ids[: request.num_computed])
        if request.num_computed == len(request.token_ids):
            if request.script is None:
                request.script = deque(self.turns.popleft() if self.turns else ())
            if request.script:
                logits[request.script.popleft()] = _CERTAIN
        return logits

    def _sample(self, request: _Request, raw: Tensor, processed: Tensor) -> CoreOutput:
        params = request.params
        token_id = self._draw(request, processed)
        is_continued = len(self.prefilled[request.id]) > 1
        request.token_ids.append(token_id)
        request.output_ids.append(token_id)
        finish_reason = None
        if token_id == self.eos_id and not params.ignore_eos:
            finish_reason = "stop"
        elif token_id in params.stop_token_ids:
            finish_reason, request.stop_reason = "stop", token_id
            if self.dies_of_empty_turns and is_continued and len(request.output_ids) == 1:
                raise EngineDeadError("a turn of no tokens")
        elif len(request.output_ids) == params.max_tokens or self._is_full(request):
            finish_reason = "length"
        return CoreOutput(
            request.id,
            token_id,
            _logprobs(raw, token_id, params.logprobs),
            finish_reason,
            request.stop_reason,  # of this turn, or still of an earlier one
            finish_reason is not None and self._is_over(request),
            request.num_cached or 0,
        )

    def _is_full(self, request: _Request) -> bool:
        return len(request.token_ids) >= self._max_model_len

    def _is_over(self, request: _Request) -> bool:
        """End a turn, and tell whether that was the end of the request."""
        if request.is_resumable and (not request.chunks or request.chunks[0] is not None):
            self._running.remove(request)
            self._waiting.append(request)
            request.status = Status.WAITING_FOR_STREAMING_REQ
            if request.chunks and (chunk := request.chunks.popleft()):
                self._continue(request, chunk)
            return False
        self.abort(request.id)
        return True

    def _draw(self, request: _Request, logits: Tensor) -> int:
        if request.grammar:
            return request.grammar.popleft()
        params = request.params
        for token_id in request.output_ids:
            logits[token_id] -= params.frequency_penalty
        for token_id in set(request.output_ids):
            logits[token_id] -= params.presence_penalty
        if not params.temperature:
            return int(logits.argmax())
        generator = request.generator or np.random.default_rng()
        noise = torch.from_numpy(generator.gumbel(size=len(logits)))
        return int((logits / params.temperature + noise).argmax())


def _logprobs(logits: Tensor, token_id: int, num_top: int | None) -> dict[int, Logprob] | None:
    if num_top is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    top = torch.topk(logprobs, num_top).indices.tolist()
    ranks = {token: rank for rank, token in enumerate(top, 1)}
    return {
        token: Logprob(float(logprobs[token]), ranks.get(token))
        for token in dict.fromkeys([token_id, *top])
    }


class _Batch:
    """Which request has which row. A row stays where it is as long as it can."""

    def __init__(self) -> None:
        self.requests: list[_Request] = []
        self._anew: set[_Request] = set()

    def forget(self, request: _Request) -> None:
        """Have ``request`` enter anew, though it may be here already."""
        self._anew.add(request)

    def update(self, scheduled: Sequence[_Request]) -> BatchUpdate | None:
        """Make it the batch of ``scheduled`` and return what became of the rows, if anything."""
        stay = {request for request in self.requests if request in scheduled} - self._anew
        free = [row for row, request in enumerate(self.requests) if request not in stay]
        self._anew.difference_update(scheduled)
        added: list[AddedRequest] = []
        rows: dict[int, _Request] = dict(enumerate(self.requests))
        for request in scheduled:
            if request not in stay:
                row = free.pop(0) if free else len(rows)
                rows[row] = request
                prompt_ids = request.token_ids[: request.num_prompt_tokens]
                added.append((row, request.params, prompt_ids, request.output_ids))
        moved = []
        for hole in list(free):
            last = max(row for row in rows if row not in free)
            if last < hole:
                break
            free.remove(hole)
            rows[hole] = rows.pop(last)
            moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        self.requests = [rows[row] for row in range(len(scheduled))]
        if not (free or added or moved):
            return None
        return BatchUpdate(len(scheduled), sorted(free, reverse=True), added, moved)
