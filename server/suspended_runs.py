"""How many runs a key may have suspended: each holds memory that others could use."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SuspendedRuns:
    """The suspended runs of each key, those first that have waited longest.

    Args:
        max_per_key: how many a key may have; None for any number.
    """

    def __init__(self, max_per_key: int | None) -> None:
        self._max_per_key = max_per_key
        self._evictions: defaultdict[str, dict[object, Callable[[], None]]] = defaultdict(dict)

    @contextmanager
    def one_more(self, key_id: str, evict: Callable[[], None]) -> Iterator[None]:
        """Count the block as a suspended run; the one that has waited longest makes room for it.

        Args:
            key_id: whose it is.
            evict: makes the block end soon. Called at most once.
        """
        evictions, run = self._evictions[key_id], object()
        evictions[run] = evict
        if self._max_per_key is not None and len(evictions) > self._max_per_key:
            evictions.pop(next(iter(evictions)))()
        try:
            yield
        finally:
            evictions.pop(run, None)
            if not evictions:
                self._evictions.pop(key_id, None)
