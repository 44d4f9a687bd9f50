"""What runs fail with, where it is the engine's doing."""

from traceback import clear_frames


class EngineError(RuntimeError):
    """The engine failed to do its part; the run it hit is over, other runs go on."""

    def __init__(self, message: str, code: str = "server_error") -> None:
        """Fail with ``message``.

        Args:
            message: what a client is told.
            code: the same in a word, one of the protocol's error codes.
        """
        super().__init__(message)
        self.code = code


def failure_of(error: Exception, message: str = "the engine failed to take a step") -> EngineError:
    """Return an error that says ``message`` and has ``error`` as its cause; or ``error``, where it
    says itself what a client is to be told.

    However long someone keeps it, it does not keep what the step worked on.
    """
    forget_frames(error)
    if isinstance(error, EngineError):
        return error.with_traceback(None)
    failure = EngineError(message)
    failure.__cause__ = error.with_traceback(None)
    return failure


def forget_frames(error: BaseException) -> None:
    """Clear the variables of all functions that ``error``, or what led to it, has ended."""
    link: BaseException | None = error
    while link is not None:
        clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
