import mmap
from pathlib import Path

import numpy as np
import pytest

from sampler import main_memory

LINE = 64
SIZES = [1, 1000, 600_000]
"""Of the last one there are large pages."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_an_array_begins_with_a_cache_line(size: int, dtype: type) -> None:
    array = main_memory.empty(size, dtype)

    assert array.shape == (size,)
    assert array.dtype == dtype
    assert array.ctypes.data % LINE == 0
    array[:] = 7
    assert (array == 7).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_flat_and_of_the_same_elements(size: int) -> None:
    array = np.arange(2 * size, dtype=np.float32).reshape(2, size)

    copy = main_memory.copy_of(array)

    assert copy.ctypes.data % LINE == 0
    assert np.array_equal(copy, array.reshape(-1))


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_too_much_is_an_error_of_memory(num_bytes: int) -> None:
    with pytest.raises(MemoryError, match=f"no {num_bytes} bytes"):
        main_memory.empty(num_bytes, np.uint8)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are none")
def test_large_pages_are_asked_for() -> None:
    array = main_memory.empty(64 << 20, np.uint8)

    assert " hg" in f" {flags_at(array.ctypes.data)}"


def flags_at(address: int) -> str:
    """Return what the kernel notes of the mapping that ``address`` is in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first, *_ = line.split(maxsplit=1)
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return line
    raise AssertionError("the address is in some mapping")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="it is not asked for")
def test_a_kernel_without_large_pages_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)

    assert len(main_memory.empty(4 << 20, np.uint8)) == 4 << 20
