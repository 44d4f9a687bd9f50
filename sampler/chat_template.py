"""Conversations to token ids: the prompt of a run, and the suffix that follows a sampled turn.

Two formats share one interface. ``TemplateFormat`` uses the chat template that ships with a model.
``ChatMLFormat`` is written by hand, for models whose ChatML template does not know tools, as
SmolLM2's.

The suffix is everything between the end-of-turn token that the model sampled and the first token
it samples next. It is made of the new items alone. What was sampled is never rendered or encoded
again, because it need not come back as the same ids.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, assert_never

import msgspec
from jinja2 import TemplateError

from protocol.items import CustomToolCall, FunctionCall, InputItem
from protocol.tools import FunctionTool
from sampler.conversation import (
    Conversation,
    ConversationError,
    Turn,
    call_text,
    role_of,
    text_of,
    turns_after,
    turns_of,
    with_tools_told,
)
from sampler.recorded_turn import Call
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN, END

THINK = "<think>"
"""Begins what a model thinks before it speaks; DeepSeek R1, QwQ, Qwen 3 and others write it."""


class ChatFormat(Protocol):
    """How one model family lays out a conversation."""

    @property
    def thinks(self) -> bool:
        """Whether the model may begin a turn with a block of thoughts."""

    @property
    def end_of_turn(self) -> int:
        """The id that ends a turn of the model.

        Raises:
            ConversationError: the format does not tell.
        """

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins.

        There are no recorded turns in it.

        Raises:
            ConversationError: it cannot be laid out.
        """

    def suffix_ids(
        self,
        calls: Sequence[Call],
        items: Sequence[InputItem],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``.

        Args:
            calls: the calls, in the order sampled.
            items: what came after the turn, up to where the model's next one begins. Outputs may
                stand anywhere among them; they follow the turn at once, in the order of the calls.
            enable_thinking: whether the model is to think in its next turn.

        Raises:
            ConversationError: they cannot be laid out.
        """

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether ``prompt_ids`` open a block of thoughts for the model to go on with."""


class ChatMLFormat:
    """ChatML turns, with calls in the style of Hermes 2 Pro and Qwen 2.5, written by hand.

    The line breaks and headers around a turn's text are encoded apart from it, so the ids of a
    header never depend on what follows, and a turn that is sampled begins exactly where a prompt
    left off. Nothing in this format tells a model to think, or not to.
    """

    def __init__(
        self, tokenizer: Tokenizer, default_system: str = "", *, thinks: bool = False
    ) -> None:
        """Lay out for ``tokenizer``, which has ``<|im_start|>`` and ``<|im_end|>``.

        Args:
            tokenizer: encodes the text.
            default_system: the system message that the model was trained to see when there is no
                other.
            thinks: whether the model writes blocks of thoughts.
        """
        self.thinks = thinks
        self.end_of_turn = tokenizer.added_tokens["<|im_end|>"]
        self._tokenizer = tokenizer
        self._default_system = default_system
        start = tokenizer.added_tokens["<|im_start|>"]
        self._newline = tokenizer.encode_text("\n")
        self._headers = {
            role: [start, *tokenizer.encode_text(f"{role}\n")]
            for role in ("system", "user", "assistant")
        }

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins."""
        self._tokenizer.counters.template_renders += 1
        turns = turns_of(conversation)
        if self._default_system and not (turns and turns[0].role == "system"):
            turns.insert(0, Turn("system", self._default_system))
        return self._ids(with_tools_told(turns, conversation.tools))

    def suffix_ids(
        self,
        calls: Sequence[Call],
        items: Sequence[InputItem],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``."""
        return [*self._newline, *self._ids(turns_after(calls, items))]

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether ``prompt_ids`` open a block of thoughts for the model to go on with."""
        return False

    def _ids(self, turns: Iterable[Turn]) -> list[int]:
        ids = [token_id for turn in turns for token_id in self._turn_ids(turn)]
        return ids + self._headers["assistant"]

    def _turn_ids(self, turn: Turn) -> list[int]:
        text = text_of(turn)
        body = self._tokenizer.encode_text(text) if text else []
        return [*self._headers[role_of(turn)], *body, self.end_of_turn, *self._newline]


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
    except (ValueError, RecursionError):
        return arguments


class Render(Protocol):
    """A model's chat template."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """Return ``messages`` as the template writes them."""


# A private-use character that breaks up control strings in data while a template is rendered, and
# another that stands for a call with free text.
_GUARD = "\ue0ff"
_FREE_TEXT = "\ue0fe"
_FREE_TEXT_CALL = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{_FREE_TEXT}.*?{END}", re.DOTALL)

# What templates raise, on purpose or because they take it for granted that they get what their
# model was trained for: a first message, say, or arguments that are an object.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError)


class TemplateFormat:
    """The model's own Jinja chat template.

    Rendering gives one string in which a template's control tokens and the control strings in a
    user's data look alike. Data is therefore guarded before it is rendered; the string is cut at
    the control tokens that are really the template's, and what lies between is encoded as text.

    Some templates refuse a system message, or a second one, or two messages of a user in a row;
    others drop it, or write it somewhere else. Then the user says what the system would, and one
    message says both.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        knows_tools: bool = True,
        thinks: bool = False,
    ) -> None:
        """Lay out for ``tokenizer``.

        Args:
            tokenizer: encodes the text.
            render: the template.
            knows_tools: whether the template renders tools, calls and outputs in the syntax that
                ``sampler.tool_calls`` parses. If not, they are told in the text of messages, as
                ``ChatMLFormat`` does.
            thinks: whether the model writes blocks of thoughts.
        """
        self.thinks = thinks
        self._tokenizer = tokenizer
        self._render = render
        self._knows_tools = knows_tools
        self._controls = tokenizer.added_tokens
        # Of two control strings that begin at one place the longer one is meant.
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._hears_system = self._renders("system", "user")
        self._hears_system_later = self._renders("user", "assistant", "system", "user")
        self._hears_users_in_a_row = self._renders("user", "user")

    @cached_property
    def end_of_turn(self) -> int:
        """The id that ends a turn of the model.

        Raises:
            ConversationError: the template does not tell.
        """
        ids = self._turn_ids([Turn("user", "x"), Turn("assistant", "x")], generates=False)
        return ids[self._sampled_turn_ends(ids)[-1] - 1]

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of the whole conversation, up to where the model's turn begins.

        Raises:
            ConversationError: the template refuses it.
        """
        told, tools = conversation.tools, None
        if self._knows_tools:
            # No template knows tools that take free text.
            functions = [tool for tool in told if isinstance(tool, FunctionTool)]
            told = [tool for tool in told if not isinstance(tool, FunctionTool)]
            tools = self._guarded(list(map(_tool, functions))) or None
        turns = with_tools_told(turns_of(conversation), told)
        return self._turn_ids(turns, tools, enable_thinking=conversation.enable_thinking)

    def suffix_ids(
        self,
        calls: Sequence[Call],
        items: Sequence[InputItem],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids that follow a sampled turn which ended in ``calls``.

        The difference, in ids, between a made-up conversation that ends in these calls and the same
        one with the items: templates do not agree on what stands between the two.

        Raises:
            ConversationError: the template does not tell where the sampled turn ends, or refuses
                what comes after it.
        """
        # What the calls say makes no difference to what follows them.
        made_up = [FunctionCall(call.call_id, call.name, "{}", call.namespace) for call in calls]
        asked = Turn("user", "x"), Turn("assistant", "" if calls else "x", calls=tuple(made_up))
        without = self._turn_ids(asked, generates=False, enable_thinking=enable_thinking)
        ends = self._sampled_turn_ends(without)
        added = turns_after(made_up, items)
        whole = self._turn_ids([*asked, *added], enable_thinking=enable_thinking)
        if whole[: ends[-1]] == without[: ends[-1]]:
            return whole[ends[-1] :]
        # Qwen 3 writes an empty <think> block into the last turn only. What was sampled stays as it
        # is, so of the turn only its end matters, and that is where it was among the ends of turns,
        # unless something before it depends on what is told.
        cut = next(iter(self._turn_ends(whole)[len(ends) - 1 :]), len(whole))
        others = [*asked, *map(_with_other_text, added)]
        if whole[:cut] != self._turn_ids(others, enable_thinking=enable_thinking)[:cut]:
            raise ConversationError("the chat template changes a turn once another follows it")
        return whole[cut:]

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether ``prompt_ids`` open a block of thoughts for the model to go on with."""
        names = {token_id: name.encode() for name, token_id in self._controls.items()}
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = (names.get(token_id) or self._tokenizer.token_bytes(token_id)) + tail
            if len(tail.strip()) >= len(THINK):
                break
        return tail.rstrip().endswith(THINK.encode())

    # --- Where turns end --------------------------------------------------------------------------

    def _sampled_turn_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the indices after the end-of-turn ids, the last of which ends all that is said."""
        ends = self._turn_ends(ids)
        if not ends or self._bytes(ids[ends[-1] :]).strip():
            raise ConversationError(
                "the chat template does not end a turn with an end-of-turn token"
            )
        return ends

    def _turn_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the indices after the end-of-turn ids."""
        stop_ids = self._tokenizer.stop_ids
        return [index + 1 for index, token_id in enumerate(ids) if token_id in stop_ids]

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))

    # --- Turns as the template takes them ---------------------------------------------------------

    def _renders(self, *roles: str) -> bool:
        """Return whether the template writes messages of these roles, all and in their order."""
        said = [f"message {index}" for index in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        try:
            rendered = self._render(messages)
        except _REFUSALS:
            return False
        places = list(map(rendered.find, said))
        return -1 not in places and places == sorted(places)

    def _fitting(self, turns: Iterable[Turn]) -> list[Turn]:
        """Return ``turns`` in roles that the template takes where they stand."""
        fitting: list[Turn] = []
        for turn in turns:
            turn = turn if self._knows_tools else Turn(role_of(turn), text_of(turn))
            is_first = all(earlier.role == "system" for earlier in fitting)
            if turn.role == "system" and not self._takes_system(is_first=is_first):
                turn = replace(turn, role="user")
            if fitting and fitting[-1].role == turn.role and self._joins(turn.role):
                text = f"{fitting[-1].text}\n\n{turn.text}"
                fitting[-1] = replace(turn, text=text)
            else:
                fitting.append(turn)
        return fitting

    def _takes_system(self, *, is_first: bool) -> bool:
        return self._hears_system if is_first else self._hears_system_later

    def _joins(self, role: str) -> bool:
        if role == "system":
            return not self._hears_system_later
        return role == "user" and not self._hears_users_in_a_row

    def _messages(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.role == "tool":
            return [
                {
                    "role": "tool",
                    "name": self._guarded(output.call.qualified_name),
                    "tool_call_id": self._guarded(output.call.call_id),
                    "content": self._guarded(output.text),
                }
                for output in turn.outputs
            ]
        message: dict[str, Any] = {"role": turn.role, "content": self._guarded(turn.text)}
        if turn.calls:
            message["tool_calls"] = list(map(self._tool_call, turn.calls))
        return [message]

    def _tool_call(self, call: Call) -> dict[str, Any]:
        match call:
            case FunctionCall():
                function = {"name": call.qualified_name, "arguments": _parsed(call.arguments)}
                function = self._guarded(function)
            case CustomToolCall():
                function = {"name": _FREE_TEXT, "arguments": {}}
            case _:
                assert_never(call)
        return {"type": "function", "id": self._guarded(call.call_id), "function": function}

    def _with_free_text(self, rendered: str, turns: Iterable[Turn]) -> str:
        """Return ``rendered`` with the calls that take free text as the model makes them.

        A template can write JSON only, so what it wrote was a stand-in.
        """
        calls = (call for turn in turns for call in turn.calls if isinstance(call, CustomToolCall))
        texts = [call_text(self._guarded_call(call)) for call in calls]
        first, *others = _FREE_TEXT_CALL.split(rendered)
        if len(others) != len(texts):
            raise ConversationError("the chat template leaves out a call")
        return first + "".join(map("".join, zip(texts, others, strict=True)))

    # --- Text is data -----------------------------------------------------------------------------

    def _guarded(self, data: Any) -> Any:
        """Return ``data`` with the control strings in it broken up, however deep they lie."""
        match data:
            case str():
                return self._control_pattern.sub(
                    lambda found: found[0][0] + _GUARD + found[0][1:], data.replace(_FREE_TEXT, "")
                )
            case list():
                return [self._guarded(item) for item in data]
            case dict():
                return {self._guarded(key): self._guarded(value) for key, value in data.items()}
            case _:
                return data

    def _guarded_call(self, call: Call) -> Call:
        return type(call)(**self._guarded(msgspec.structs.asdict(call)))

    def _turn_ids(
        self,
        turns: Iterable[Turn],
        tools: list[dict[str, Any]] | None = None,
        *,
        generates: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        turns = self._fitting(turns)
        messages = [message for turn in turns for message in self._messages(turn)]
        self._tokenizer.counters.template_renders += 1
        try:
            rendered = self._render(
                messages,
                tools=tools,
                add_generation_prompt=generates,
                enable_thinking=enable_thinking,
            )
        except _REFUSALS as error:
            raise ConversationError(f"the chat template refuses this: {error}") from error
        return list(self._encode(self._with_free_text(rendered, turns)))

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


def _with_other_text(turn: Turn) -> Turn:
    """Return ``turn`` as it would be if it said something else."""
    outputs = tuple(replace(output, text=f"{output.text}x") for output in turn.outputs)
    return replace(turn, text=f"{turn.text}x", outputs=outputs)
