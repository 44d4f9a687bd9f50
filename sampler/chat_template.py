"""Conversations to token ids: the prompt of a run, and the suffix that a tool result adds.

Two formats share one interface. ``TemplateFormat`` uses the chat template that ships with a model.
``ChatMLFormat`` is written by hand, for models whose ChatML template does not know tools, as
SmolLM2's.

The suffix is everything between the end-of-turn token that the model sampled and the first token
it samples next. It is made of the new items alone. What was sampled is never rendered or encoded
again, because it need not come back as the same ids.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from protocol.items import FunctionCall, Message
from protocol.tools import FunctionTool
from sampler.conversation import (
    Conversation,
    Turn,
    role_of,
    text_of,
    turns_after_calls,
    turns_of,
    with_tools_told,
)
from sampler.tokenizer import Tokenizer


class ConversationError(ValueError):
    """A conversation that the model's chat template refuses or cannot continue."""


class ChatFormat(Protocol):
    """How one model family lays out a conversation."""

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins."""

    def suffix_ids(
        self,
        calls: Sequence[FunctionCall],
        outputs: Sequence[str],
        messages: Sequence[Message] = (),
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``.

        Args:
            calls: the calls, in the order sampled.
            outputs: their outputs, in the same order.
            messages: what the user adds after them.
        """


class ChatMLFormat:
    """ChatML turns, with calls in the style of Hermes 2 Pro and Qwen 2.5, written by hand.

    The line breaks and headers around a turn's text are encoded apart from it, so the ids of a
    header never depend on what follows, and a turn that is sampled begins exactly where a prompt
    left off.
    """

    def __init__(self, tokenizer: Tokenizer, default_system: str = "") -> None:
        """Lay out for ``tokenizer``, which has ``<|im_start|>`` and ``<|im_end|>``.

        Args:
            tokenizer: encodes the text.
            default_system: the system message that the model was trained to see when there is no
                other.
        """
        self._tokenizer = tokenizer
        self._default_system = default_system
        self._start = tokenizer.added_tokens["<|im_start|>"]
        self._end = tokenizer.added_tokens["<|im_end|>"]
        self._newline = tokenizer.encode_text("\n")
        self._headers = {
            role: [self._start, *tokenizer.encode_text(f"{role}\n")]
            for role in ("system", "user", "assistant")
        }

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins."""
        self._tokenizer.counters.template_renders += 1
        turns = turns_of(conversation)
        if self._default_system and not (turns and turns[0].role == "system"):
            turns.insert(0, Turn("system", self._default_system))
        turns = with_tools_told(turns, conversation.functions)
        ids = [token_id for turn in turns for token_id in self._turn_ids(turn)]
        return ids + self._headers["assistant"]

    def suffix_ids(
        self,
        calls: Sequence[FunctionCall],
        outputs: Sequence[str],
        messages: Sequence[Message] = (),
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``."""
        turns = turns_after_calls(calls, outputs, messages)
        ids = [token_id for turn in turns for token_id in self._turn_ids(turn)]
        return [*self._newline, *ids, *self._headers["assistant"]]

    def _turn_ids(self, turn: Turn) -> list[int]:
        text = text_of(turn)
        body = self._tokenizer.encode_text(text) if text else []
        return [*self._headers[role_of(turn)], *body, self._end, *self._newline]


def _tool(function: FunctionTool) -> dict[str, Any]:
    described = {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": described}


def _parsed(arguments: str) -> Any:
    """Return what templates want arguments to be: an object, or text where they are not one."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]
"""``render(messages, tools, add_generation_prompt)`` of a model's chat template."""

# A private-use character that breaks up control strings in data while a template is rendered.
_GUARD = "\ue0ff"


class TemplateFormat:
    """The model's own Jinja chat template.

    Rendering gives one string in which a template's control tokens and the control strings in a
    user's data look alike. Data is therefore guarded before it is rendered; the string is cut at
    the control tokens that are really the template's, and what lies between is encoded as text.
    """

    def __init__(self, tokenizer: Tokenizer, render: Render, *, knows_tools: bool = True) -> None:
        """Lay out for ``tokenizer``.

        Args:
            tokenizer: encodes the text.
            render: the template.
            knows_tools: whether the template renders tools, calls and outputs in the syntax that
                ``sampler.tool_calls`` parses. If not, they are told in the text of messages, as
                ``ChatMLFormat`` does.
        """
        self._tokenizer = tokenizer
        self._render = render
        self._knows_tools = knows_tools
        self._controls = tokenizer.added_tokens
        # Of two control strings that begin at one place the longer one is meant.
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins.

        Raises:
            ConversationError: the template refuses it.
        """
        turns = turns_of(conversation)
        tools = None
        if conversation.functions and self._knows_tools:
            tools = self._guarded(list(map(_tool, conversation.functions)))
        elif conversation.functions:
            turns = with_tools_told(turns, conversation.functions)
        messages = [message for turn in turns for message in self._messages(turn)]
        return self._ids(messages, tools, add_generation_prompt=True)

    def suffix_ids(
        self,
        calls: Sequence[FunctionCall],
        outputs: Sequence[str],
        messages: Sequence[Message] = (),
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``.

        The difference, in ids, between a made-up conversation that ends in these calls and the same
        one with the outputs: templates do not agree on what stands between the two.

        Raises:
            ConversationError: the template does not tell where the sampled turn ends, or refuses
                what comes after it.
        """
        asked = Turn("user", "x"), Turn("assistant", "" if calls else "x", calls=tuple(calls))
        without = self._turn_ids(asked, add_generation_prompt=False)
        ends = self._turn_ends(without)
        if not ends or self._bytes(without[ends[-1] :]).strip():
            raise ConversationError(
                "the chat template does not end a turn with an end-of-turn token"
            )
        whole = self._turn_ids([*asked, *turns_after_calls(calls, outputs, messages)])
        if whole[: ends[-1]] == without[: ends[-1]]:
            return whole[ends[-1] :]
        # Qwen 3 writes an empty <think> block into the last turn only. What was sampled stays as it
        # is, so of the turn only its end matters, and that is where it was among the ends of turns,
        # unless something before it depends on what is told.
        cut = next(iter(self._turn_ends(whole)[len(ends) - 1 :]), len(whole))
        other_messages = [Message(message.role, f"{message.text}x") for message in messages]
        other = turns_after_calls(calls, [f"{output}x" for output in outputs], other_messages)
        if whole[:cut] != self._turn_ids([*asked, *other])[:cut]:
            raise ConversationError("the chat template changes a turn once another follows it")
        return whole[cut:]

    def _turn_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the indices after the end-of-turn ids."""
        stop_ids = self._tokenizer.stop_ids
        return [index + 1 for index, token_id in enumerate(ids) if token_id in stop_ids]

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))

    def _messages(self, turn: Turn) -> list[dict[str, Any]]:
        if not self._knows_tools:
            return [{"role": role_of(turn), "content": self._guarded(text_of(turn))}]
        if turn.role == "tool":
            return [
                {
                    "role": "tool",
                    "name": self._guarded(output.call.name),
                    "tool_call_id": self._guarded(output.call.call_id),
                    "content": self._guarded(output.text),
                }
                for output in turn.outputs
            ]
        message: dict[str, Any] = {"role": turn.role, "content": self._guarded(turn.text)}
        if turn.calls:
            message["tool_calls"] = [self._tool_call(call) for call in turn.calls]
        return [message]

    def _tool_call(self, call: FunctionCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": _parsed(call.arguments)}
        return {
            "type": "function",
            "id": self._guarded(call.call_id),
            "function": self._guarded(function),
        }

    def _guarded(self, data: Any) -> Any:
        """Return ``data`` with the control strings in it broken up, however deep they lie."""
        match data:
            case str():
                return self._control_pattern.sub(
                    lambda found: found[0][0] + _GUARD + found[0][1:], data.replace(_GUARD, "")
                )
            case list():
                return [self._guarded(item) for item in data]
            case dict():
                return {self._guarded(key): self._guarded(value) for key, value in data.items()}
            case _:
                return data

    def _turn_ids(self, turns: Iterable[Turn], *, add_generation_prompt: bool = True) -> list[int]:
        messages = [message for turn in turns for message in self._messages(turn)]
        return self._ids(messages, None, add_generation_prompt=add_generation_prompt)

    def _ids(
        self, messages: list[dict[str, Any]], tools: Any, *, add_generation_prompt: bool
    ) -> list[int]:
        self._tokenizer.counters.template_renders += 1
        try:
            rendered = self._render(messages, tools, add_generation_prompt)
        except TemplateError as error:
            # Templates raise on what their model was not trained for: a system role, say.
            raise ConversationError(f"the chat template refuses this: {error}") from error
        return list(self._encode(rendered))

    def _encode(self, rendered: str) -> Iterator[int]:
        start = 0
        for control in self._control_pattern.finditer(rendered):
            yield from self._encode_text(rendered[start : control.start()])
            yield self._controls[control[0]]
            start = control.end()
        yield from self._encode_text(rendered[start:])

    def _encode_text(self, text: str) -> list[int]:
        text = text.replace(_GUARD, "")
        return self._tokenizer.encode_text(text) if text else []
