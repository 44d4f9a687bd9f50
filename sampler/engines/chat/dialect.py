"""What chat-completions endpoints take differently."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ChatDialect:
    """What one kind of endpoint takes."""

    reasoning_field: str | None
    """The member in which a message of the assistant carries its thoughts back; None: nowhere."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Members that go along with every request; they replace ours of the same name."""
    takes_allowed_tools: bool = False
    """Whether the choice among the tools may be a part of them."""
    mixes_strict: bool = True
    """Whether some of a request's tools may be strict and others not."""


CEREBRAS = ChatDialect(
    reasoning_field="reasoning",  # any other name is refused
    # By default GLM forgets its thoughts when the user speaks: nothing behind them stays cached.
    extra={"clear_thinking": False},
    mixes_strict=False,
)
"""The Cerebras inference API. It refuses requests with members that it does not know."""

COMPATIBLE = ChatDialect(reasoning_field=None)
"""What all those take that do as OpenAI's endpoint does. Thoughts are not sent back: there is no
name for them that all know, and some endpoints refuse what they do not know."""

OPENAI_CHAT = ChatDialect(reasoning_field=None, takes_allowed_tools=True)
"""OpenAI's own endpoint (OpenAI reference, create a chat completion)."""
