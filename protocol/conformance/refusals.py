"""Refusals: what a server says that will not do something, over HTTP or in an error frame."""

from dataclasses import dataclass

from protocol.conformance.rules import NotSupportedError, expect
from protocol.conformance.shapes import Event

_UNSUPPORTED_CODES = (
    "unknown_parameter",
    "unsupported_event_type",
    "unsupported_parameter",
    "unsupported_value",
)
_UNSUPPORTED_WORDS = ("not support", "unsupported", "not available", "not implemented")
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True)
class Refusal:
    """What the client is told."""

    status: int
    code: str | None
    param: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.status} {self.code}, param {self.param}: {self.message}"

    def expect(
        self,
        *,
        status: int | tuple[int, ...] = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        """Require what is told: this status, and this code and param where they are given.

        Raises:
            NonconformityError: something else is told.
        """
        statuses = status if isinstance(status, tuple) else (status,)
        expect(self.status in statuses, f"expected status {status}, got {self}")
        expect(code in (None, self.code), f"expected code {code}, got {self}")
        expect(param in (None, self.param), f"expected param {param}, got {self}")

    def raise_unless_it_is_a_fault(self) -> None:
        """Raise if the server says that it does not do such a thing. One that breaks says nothing.

        Raises:
            NotSupportedError: it does not do it.
        """
        if not (400 <= self.status < 500 or self.status == _NOT_IMPLEMENTED):
            return
        is_code = self.code in _UNSUPPORTED_CODES
        if is_code or any(words in self.message.lower() for words in _UNSUPPORTED_WORDS):
            raise NotSupportedError(str(self))


def refusal(status: int, error: Event) -> Refusal:
    """Return what ``error``, the object in a frame or a body, says."""
    code, param = error.get("code"), error.get("param")
    return Refusal(status, code, param, str(error.get("message", "")))
