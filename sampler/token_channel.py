"""The way of a segment's tokens from the model thread to the coroutine of its run.

The two ends run at different speeds. The model thread may be ahead by a window of tokens: each
token that it sends uses up a credit, and each one that the coroutine is done with gives it back.
With a window of one they go in lockstep: the next token is sampled when everybody has seen the last
one. With a longer one, an event loop that is busy for a moment does not hold the model up.

Each end has a counter that only it writes. So neither needs a lock to see whether there is credit.
"""

import asyncio
from collections import deque
from contextlib import suppress

from sampler.engine_error import EngineError
from sampler.run import StopReason
from sampler.sampling import Sampled

Token = Sampled | StopReason | None
"""What is received: a token; or, as the last, why there are no more."""
Message = Token | EngineError
"""What is sent: a token; or, as the last message, why there are no more: the reason to stop, the
error, or None for a cache that is filled."""


class Mailbox:
    """What one event loop is to be told.

    To wake it takes a system call, and both threads compete for the interpreter then. So it is
    called once for all that was posted since it last looked.
    """

    def __init__(self) -> None:
        """Make that of the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._posted: deque[Told] = deque()
        self._is_called = False

    def post(self, told: "Told") -> None:
        """Have ``told`` delivered. On the model thread."""
        self._posted.append(told)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # it is closed, and those who wanted to know are gone
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # first, or what is posted right now is not called for
        while self._posted:
            for channel, message in self._posted.popleft():
                channel.deliver(message)


class TokenChannel:
    """The messages about one job, from when it is handed to the model thread to its end."""

    def __init__(self, mailbox: Mailbox, window: int) -> None:
        """Open it.

        Args:
            mailbox: of the event loop that it leads to.
            window: how many tokens may have been sent and not been taken.
        """
        self.mailbox = mailbox
        self.window = window
        self.num_sent = 0
        """Tokens; the model thread's to write."""
        self.num_taken = 0
        """Those of them that the coroutine is done with; the event loop's to write."""
        self.stalled_since: float | None = None
        """When the last credit went, or the last message; the model thread's to write."""
        self.is_over = False
        """Whether the last message was sent; the model thread's to write."""
        self._arrived: list[Token] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_credit(self) -> bool:
        """Whether one more token may be sent."""
        return self.num_sent - self.num_taken < self.window

    async def receive(self) -> list[Token]:
        """Return all messages that are there, at least one, as soon as there is one.

        Raises:
            EngineError: it is what comes next.
        """
        while not self._arrived:
            if self._error is not None:
                self._raise()
            self._waiter = self.mailbox.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def deliver(self, message: Message) -> None:
        """Let ``message`` be received. In the event loop."""
        if isinstance(message, EngineError):
            self._error = message
        else:
            self._arrived.append(message)
        self._wake()

    def cancel(self) -> None:
        """Have whoever waits for a message cancelled: there will be none. In the event loop."""
        self._error = asyncio.CancelledError("the engine was closed")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise(self) -> None:
        # The error may be kept for long, with its traceback. It must not find itself in there.
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error


Told = list[tuple[TokenChannel, Message]]
"""What there is to tell, and to whom."""
