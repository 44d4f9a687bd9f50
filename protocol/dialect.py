"""How a client goes on at a tool boundary, as it says in the WebSocket handshake.

Only the closing event of a segment depends on it: clients of the prototype wait for
``response.done``, and every other client would wait for ever after one.
"""

from enum import Enum

from protocol import errors

APPEND_BETA = "responses_websockets=2026-02-04"
"""What clients of the prototype put into ``OpenAI-Beta`` (Codex 0.99 to 0.107)."""


class Dialect(Enum):
    """How a segment that ends in tool calls is closed."""

    APPEND = "append"
    """With ``response.done``; the response goes on after ``response.append``."""
    COMPLETED = "completed"
    """With ``response.completed``; what comes next is another response."""


def negotiate(beta_header: str, query: str | None) -> Dialect:
    """Return the dialect that a handshake asks for.

    Args:
        beta_header: the ``OpenAI-Beta`` header, which may list several values.
        query: the ``dialect`` parameter of the URL, for browsers, which cannot set headers.

    Raises:
        ProtocolError: ``query`` names no dialect.
    """
    if query is not None:
        if query not in {dialect.value for dialect in Dialect}:
            raise errors.unexpected_value("dialect", query, "'append' or 'completed'")
        return Dialect(query)
    values = [value.strip() for value in beta_header.split(",")]
    return Dialect.APPEND if APPEND_BETA in values else Dialect.COMPLETED
