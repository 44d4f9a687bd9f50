"""What stands in for CUDA graphs on a processor.

It records torch's operations, not the Python code that asks for them. So it does again what a graph
does: the same operations on the same memory, whatever the code would do by now. What a recording
makes keeps its memory, into which a replay writes anew.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperations(TorchDispatchMode):
    """Records all operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # As on CUDA: what reads values would have to wait, and what has none is not on the device.
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph waits for nothing"
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def __len__(self) -> int:
        return len(self._operations)

    def replay(self) -> None:
        """Do them again."""
        for func, args, kwargs, result in self._operations:
            there = list(_tensors(result))
            if _is_in_one_of(there, list(_tensors((args, kwargs)))):
                if func._schema.is_mutable:
                    func(*args, **kwargs)
                continue  # a view still is one
            for tensor, anew in zip(there, _tensors(func(*args, **kwargs)), strict=True):
                tensor.copy_(anew)


def record(function: Callable[[], None]) -> Callable[[], None]:
    """Record ``function``; see ``step_graphs.Capture``."""
    operations = RecordedOperations()
    with operations:
        function()
    assert len(operations), "it did something"
    return operations.replay


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _is_in_one_of(results: list[Tensor], arguments: list[Tensor]) -> bool:
    """Tell whether ``results`` have the memory of one of the ``arguments``."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in arguments}
    return any(tensor.untyped_storage().data_ptr() in memory for tensor in results)
