"""A conversation as a model reads it: for the most part, the token ids it makes.

A conversation is laid out in pieces that never touch one another: what comes before the first turn
that was sampled here, by the chat format's prompt; each sampled turn, by the very ids that were
sampled; and what follows each, by the chat format's suffix. So a prompt grows at its end only, and
whoever knows the ids of a conversation need encode no more than what came since. Both ways give the
same ids, as they put the same pieces together.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from protocol.items import InputItem, Message
from sampler.chat_template import ChatFormat
from sampler.conversation import Conversation, ConversationError
from sampler.recorded_turn import (
    Item,
    RecordedTurn,
    answerable_calls,
    next_turn,
    plain_items,
    turn_at,
)
from sampler.snapshot import num_common
from sampler.truncation import truncations


@dataclass(frozen=True)
class Prompt(ABC):
    """A conversation in the form in which an engine samples from it."""

    conversation: Conversation

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """How long it is."""

    @abstractmethod
    def after(self, turn: RecordedTurn) -> "Prompt":
        """Return what this has become once the model has said ``turn``."""


@dataclass(frozen=True)
class TokenPrompt(Prompt):
    """A conversation and the ids it makes, the model's turn to come or said already."""

    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def after(self, turn: RecordedTurn) -> "TokenPrompt":
        conversation = self.conversation.after(turn)
        return TokenPrompt(conversation, self.token_ids + turn.token_ids)


def encode(
    chat_format: ChatFormat, conversation: Conversation, known: TokenPrompt | None = None
) -> TokenPrompt:
    """Return the prompt that ``conversation`` makes, up to where the model's turn begins.

    Args:
        chat_format: the model's.
        conversation: with recorded turns wherever the model's own words are known.
        known: a prompt that ends in a recorded turn. Where the conversation goes on from there,
            nothing that comes before is laid out again.

    Raises:
        ConversationError: the chat format cannot lay it out.
    """
    items = conversation.items
    if known is not None and goes_on_from(known.conversation, conversation):
        start = len(known.conversation.items) - 1
        token_ids = list(known.token_ids[: -len(turn_at(items, start).token_ids)])
    else:
        start = next_turn(items, 0)
        token_ids = chat_format.prompt_ids(replace(conversation, items=items[:start]))
    while start < len(items):
        turn, stop = turn_at(items, start), next_turn(items, start + 1)
        following = plain_items(items[start + 1 : stop])
        calls = answerable_calls(items[:start], turn, following)
        token_ids += turn.token_ids
        token_ids += chat_format.suffix_ids(
            calls, following, enable_thinking=conversation.enable_thinking
        )
        start = stop
    return TokenPrompt(conversation, tuple(token_ids))


def encode_beginning(
    chat_format: ChatFormat, conversation: Conversation, known: TokenPrompt | None = None
) -> TokenPrompt:
    """Return the ids that the prompt begins with of whatever ``conversation`` becomes.

    That is all but what depends on who speaks next. Many chat templates refuse a conversation in
    which no user has spoken yet; so it is also laid out with what one might say.

    Raises:
        ConversationError: the chat format cannot lay it out, whoever speaks next.
    """

    def with_said(*said: Message) -> tuple[int, ...]:
        longer = replace(conversation, items=[*conversation.items, *said])
        return encode(chat_format, longer, known).token_ids

    token_ids = with_said(Message("user", "a"))
    token_ids = token_ids[: num_common(token_ids, with_said(Message("user", "b")))]
    with suppress(ConversationError):
        token_ids = token_ids[: num_common(token_ids, with_said())]
    return TokenPrompt(conversation, token_ids)


def longest_known(conversation: Conversation, prompts: Iterable[Prompt]) -> Prompt | None:
    """Return the one of ``prompts`` that saves most in laying out ``conversation``, if any does."""
    known = [prompt for prompt in prompts if goes_on_from(prompt.conversation, conversation)]
    return max(known, key=lambda prompt: len(prompt.conversation.items), default=None)


def fit(
    chat_format: ChatFormat,
    conversation: Conversation,
    limit: int,
    known: TokenPrompt | None = None,
    coda: Sequence[InputItem] = (),
) -> TokenPrompt:
    """Return the prompt of as much of ``conversation`` as makes at most ``limit`` ids.

    What is left out are its oldest turns; the ``coda`` follows what is left. Where it is too long
    without all those that can be left out, what remains is returned nevertheless.

    Raises:
        ConversationError: the chat format cannot lay it out.
    """

    def prompt_of(items: Sequence[Item], known: TokenPrompt | None = None) -> TokenPrompt:
        return encode(chat_format, replace(conversation, items=[*items, *coda]), known)

    prompt = prompt_of(conversation.items, known)
    if len(prompt.token_ids) <= limit:
        return prompt
    shorter = truncations(conversation.items)

    @cache
    def shorter_prompt(index: int) -> TokenPrompt:
        return prompt_of(shorter[index])

    def fits(index: int) -> bool:
        return len(shorter_prompt(index).token_ids) <= limit

    longest = bisect_left(range(len(shorter)), True, key=fits)
    return shorter_prompt(min(longest, len(shorter) - 1)) if shorter else prompt


def goes_on_from(known: Conversation, conversation: Conversation) -> bool:
    """Return whether ``conversation`` is ``known``, which ends in a recorded turn, and more."""
    length = len(known.items)
    return (
        length > 0
        and isinstance(known.items[-1], RecordedTurn)
        and list(conversation.items[:length]) == list(known.items)
        and known.instructions == conversation.instructions
        and list(known.tools) == list(conversation.tools)
        and known.enable_thinking == conversation.enable_thinking
    )
