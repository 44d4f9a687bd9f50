"""How a client goes on at a tool boundary, as it says in the WebSocket handshake.

Only how a segment ends on the wire depends on it: clients of the prototype wait for
``response.done``, and every other client would wait for ever after one.
"""

from enum import Enum

from protocol import errors

APPEND_BETA = "responses_websockets=2026-02-04"
"""What clients of the prototype put into ``OpenAI-Beta`` (Codex 0.99 to 0.107)."""

INJECT_BETA = "responses_multi_agent=v1"
"""What clients that inject put there (OpenAI guide, Multi-agent)."""


class Dialect(Enum):
    """How a segment that ends in tool calls is closed."""

    APPEND = "append"
    """With ``response.done``; the response goes on after ``response.append``."""
    INJECT = "inject"
    """Not at all; the response stays open and goes on after ``response.inject``."""
    CHAINED = "chained"
    """With ``response.completed``; what comes next is another response."""


BETAS = {APPEND_BETA: Dialect.APPEND, INJECT_BETA: Dialect.INJECT}


def negotiate(beta_header: str, query: str | None) -> Dialect:
    """Return the dialect that a handshake asks for.

    Args:
        beta_header: the ``OpenAI-Beta`` header, which may list several values; the first that
            names a dialect counts.
        query: the ``dialect`` parameter of the URL, for browsers, which cannot set headers.

    Raises:
        ProtocolError: ``query`` names no dialect.
    """
    if query is not None:
        if query not in {dialect.value for dialect in Dialect}:
            raise errors.unexpected_value("dialect", query, "'append', 'inject' or 'chained'")
        return Dialect(query)
    values = [value.strip() for value in beta_header.split(",")]
    return next((BETAS[value] for value in values if value in BETAS), Dialect.CHAINED)
