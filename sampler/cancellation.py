"""Waiting for what goes on whether or not somebody waits for it."""

import asyncio
from typing import Any


async def ended(future: "asyncio.Future[Any]") -> None:
    """Wait until ``future`` is done, whatever it comes to, even on cancellation.

    Raises:
        CancelledError: the caller was cancelled meanwhile.
    """
    is_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
