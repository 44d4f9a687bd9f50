"""Steps that decode, as graphs: recorded once, and then launched as a whole.

A step of a small model is some two dozen short operations a layer. Launched one by one from Python
they take several milliseconds, most of which a large accelerator spends waiting. CUDA can record
what is launched, as a *graph*, and do it again at one command.

What was recorded is done again to the letter: the same operations, of the same sizes, on the same
memory. So there is a graph for each *bucket*, a number of rows and a number of blocks that each row
reads; a step goes into the smallest bucket that holds it. What tells one step from the next is
copied into memory that the graph reads. Rows that are missing are copies of the last one, which
write the same to the same place, and blocks that are missing are copies of a row's first one, which
is masked. The network is not written a second time: what is recorded is the very function that
computes other steps.

**Trust.** The step that is the first of its bucket is computed the ordinary way, and again by the
new graph, which was recorded on other tokens. If the logits differ by more than rounding explains,
or if anything fails, one warning is logged, and there are no graphs any more.

**Memory.** All graphs share what they need beside their inputs, as one runs at a time. That is not
part of the memory for keys and values. A step in which much is read is bound by that and not by its
launches, so it gets no graph, which bounds the memory too.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function has a device do, and returns what has the device do it again.

The function may be called several times meanwhile. It takes what differs from step to step from
memory on the device, and never waits for the device."""

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_LEAST_WIDTH = 16
"""In blocks; wider ones are powers of two."""
_MOST_GRAPHS = 48
"""Each takes some memory for itself. None is ever given up for another: as some versions of torch
have it, the libraries' workspaces would go with it, which others still use."""
# In bytes that a layer reads of keys and values. Its launches are held to take 100 microseconds, in
# which a device can copy and read some tens of megabytes. Beyond that there is little to be won,
# and reading what only pads may lose more.
_MOST_READ = 128 << 20
_MOST_PADDING = 32 << 20
# Of the largest logit. With SmolLM2 135M, rows that are padded and computed beside others differ by
# 0.008 of it in bfloat16 and 0.000002 in float32, and those of other tokens by 0.4 to 1.1.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-3}


class DecodingRow(NamedTuple):
    """A token to be forwarded."""

    token_id: int
    position: int
    blocks: Sequence[int]
    """Those of its sequence, the one that it is written to included."""


class _Bucket(NamedTuple):
    """The size of a step."""

    num_rows: int
    width: int
    """Blocks of a row."""


class _Graph:
    """A recorded step, with the memory that it reads."""

    def __init__(self, bucket: _Bucket, device: torch.device) -> None:
        self._bucket = bucket
        self.inputs = torch.zeros(
            (bucket.num_rows, 2 + bucket.width), dtype=torch.int64, device=device
        )
        """``(rows, 2 + width)``: of each row its token, its position, and its blocks."""
        self.replay: Callable[[], None] = _nothing
        """Does the step that the inputs tell of."""

    def fill(self, rows: Sequence[DecodingRow]) -> None:
        """Tell of ``rows``, of which there is at least one."""
        table = np.empty(self.inputs.shape, np.int64)
        table[: len(rows), 0] = [row.token_id for row in rows]
        table[: len(rows), 1] = [row.position for row in rows]
        table[: len(rows), 2:] = padded([row.blocks for row in rows], self._bucket.width)
        table[len(rows) :] = table[len(rows) - 1]
        self.inputs.copy_(sent(table, self.inputs.device))


class StepGraphs:
    """Computes steps by graphs, as far as it has them, or can have them."""

    def __init__(
        self,
        compute: Callable[[Tensor], Tensor],
        capture: Capture,
        *,
        block_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Record ``compute``.

        Args:
            compute: returns ``(rows, vocab)`` float32, from ``(rows, 2 + width)`` int64 as the
                graphs have it; that, weights, keys and values are all it reads. Doing it twice does
                no harm.
            capture: records.
            block_bytes: what one layer keeps of a block.
            dtype: in what it computes.
            device: where it computes.
        """
        self._compute = compute
        self._capture: Capture | None = capture
        self._block_bytes = block_bytes
        self._tolerance = _TOLERANCES.get(dtype, max(_TOLERANCES.values()))
        self._device = device
        self._graphs: dict[_Bucket, _Graph] = {}
        self._output: Tensor | None = None
        """``(most rows, vocab)``: where all graphs leave their logits."""

    def logits(self, rows: Sequence[DecodingRow], ordinary: Callable[[], Tensor]) -> Tensor:
        """Return the logits of ``rows``, ``(rows, vocab)`` float32, which are the caller's.

        Args:
            rows: what is to be forwarded.
            ordinary: does so without a graph. Whatever it raises is raised.
        """
        bucket = self._bucket(rows)
        if self._capture is None or bucket is None:
            return ordinary()
        if graph := self._graphs.get(bucket):
            return self._launched(graph, rows)
        if len(self._graphs) == _MOST_GRAPHS:
            return ordinary()
        expected = ordinary()
        if (fault := self._begin(bucket, self._capture, rows, expected)) is None:
            return expected
        logger.warning("CUDA graphs are not used any more, which may be slower: %s", fault)
        self._capture = self._output = None
        self._graphs.clear()
        return ordinary()  # again: there is no telling which keys and values were written

    def _bucket(self, rows: Sequence[DecodingRow]) -> _Bucket | None:
        """Return the smallest that holds ``rows``; None where there is nothing to be won by one."""
        num_rows = next((number for number in _ROWS if number >= len(rows)), None)
        if num_rows is None:
            return None
        longest = max(len(row.blocks) for row in rows)
        width = max(_LEAST_WIDTH, 1 << (longest - 1).bit_length())
        num_read = num_rows * width
        num_padding = num_read - sum(len(row.blocks) for row in rows)
        if (
            num_read * self._block_bytes > _MOST_READ
            or num_padding * self._block_bytes > _MOST_PADDING
        ):
            return None
        return _Bucket(num_rows, width)

    def _begin(
        self, bucket: _Bucket, capture: Capture, rows: Sequence[DecodingRow], expected: Tensor
    ) -> str | None:
        """Record a graph, and keep it if it gives what is ``expected`` of ``rows``.

        Returns:
            What is wrong with it, if anything is.
        """
        try:
            graph = self._recorded(bucket, capture, rows, vocab_size=expected.shape[1])
            difference = _difference(self._launched(graph, rows), expected)
        except Exception as error:  # noqa: BLE001  whatever it is, steps can do without a graph
            return f"{type(error).__name__}: {error}"
        if difference > self._tolerance:
            return f"its logits differ by {difference:.2g} of the largest from what they should be"
        self._graphs[bucket] = graph
        return None

    def _recorded(
        self, bucket: _Bucket, capture: Capture, rows: Sequence[DecodingRow], vocab_size: int
    ) -> _Graph:
        graph = _Graph(bucket, self._device)
        # With other tokens, so that the check sees whether the graph reads those it is told of. The
        # places are these rows' own: what recording may write there, the graph writes anew.
        graph.fill([row._replace(token_id=int(row.token_id == 0)) for row in rows])
        if self._output is None:
            size = (_ROWS[-1], vocab_size)
            self._output = torch.empty(size, dtype=torch.float32, device=self._device)
        output = self._output[: bucket.num_rows]
        graph.replay = capture(lambda: _copy(output, self._compute(graph.inputs)))
        return graph

    def _launched(self, graph: _Graph, rows: Sequence[DecodingRow]) -> Tensor:
        assert self._output is not None, "there is one where there is a graph"
        graph.fill(rows)
        graph.replay()
        return self._output[: len(rows)].clone()  # the next step overwrites it


class CUDACapture:
    """Records on CUDA, in the thread that calls it. One of its graphs may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All graphs are recorded on one stream, so that they have the same memory in turns.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record ``function``; see ``Capture``.

        Raises:
            RuntimeError: it does what cannot be recorded, or there is no memory.
        """
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            # torch.cuda.graph does not leave its stream where a recording breaks off; this does.
            with torch.cuda.stream(self._stream):
                # What libraries set up when they are first used cannot be recorded.
                for _ in range(2):
                    function()
                # Other threads may do with CUDA what they like meanwhile.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    function()
        finally:
            # What was done of it is over before the caller writes to the same places.
            caller.wait_stream(self._stream)
        return graph.replay


def padded(blocks: Sequence[Sequence[int]], width: int) -> NDArray[np.int64]:
    """Return rows of ``blocks`` as ``(rows, width)``.

    Shorter ones have their own first block, which is surely written, once more.
    """
    table = np.empty((len(blocks), width), np.int64)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[0]
    return table


def sent(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return ``numbers`` on ``device``. CUDA is not waited for."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    # Memory that is pinned is read later; until then torch does not give it away again.
    return tensor.pin_memory().to(device, non_blocking=True)


def _difference(logits: Tensor, expected: Tensor) -> float:
    """Return the greatest difference as a share of the largest logit.

    Where there is no number, there is to be none.
    """
    is_number = expected.isfinite()
    if not is_number.equal(logits.isfinite()):
        return torch.inf
    expected, logits = expected[is_number], logits[is_number]
    if not len(expected):
        return 0.0
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    """Do nothing: it is not recorded yet."""
