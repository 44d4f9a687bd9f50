"""What all tests of the server share."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_model_thread() -> Iterator[None]:
    """Layers this small are ten times faster on one thread than on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """What a run held has to be free once it is over, not once the collector finds it: among
    millions of objects that may be minutes later."""
    gc.disable()
    yield
    gc.enable()
