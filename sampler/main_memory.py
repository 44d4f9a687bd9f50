"""Main memory that the processor is quick to get at.

NumPy's arrays begin 16 bytes behind the beginning of a cache line, so that each vector of 64 bytes
lies across two. And memory comes in pages of 4 KiB, whose places the processor has to look up,
thousands of times for one pass over the weights; where the system has larger pages, it can be asked
for them.
"""

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_LARGE_PAGE = 2 << 20
"""Bytes, of the larger pages of x86 and of most ARM systems. What is smaller would waste one."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class TooLittleMemoryError(MemoryError):
    """The system has not as much as is asked for."""


def empty(num_elements: int, dtype: Any) -> NDArray[Any]:
    """Return an array ``(num_elements,)`` that may hold anything, and begins with a cache line.

    What is not written to is not resident, up to a large page.

    Raises:
        TooLittleMemoryError: there is not so much.
    """
    num_bytes = num_elements * np.dtype(dtype).itemsize
    if _ADVICE is None or num_bytes < _LARGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().view(dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        message = f"there are no {num_bytes} bytes of memory: {error}"
        raise TooLittleMemoryError(message) from error
    _advise(pages)
    return np.frombuffer(pages, dtype)


def _advise(pages: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)


def copy_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same elements, flat, in such memory."""
    copy = empty(array.size, array.dtype)
    copy[:] = array.reshape(-1)
    return copy
