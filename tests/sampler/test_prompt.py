"""Prompts of sampled turns: the log of a run that was never interrupted, by whatever way."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.items import CallOutput, CustomToolCall, FunctionCall, InputItem, Message
from sampler.chat_template import ChatFormat, ChatMLFormat
from sampler.conversation import Conversation, ConversationError, call_text
from sampler.counters import Counters
from sampler.prompt import TokenPrompt, encode, encode_beginning, fit, longest_known
from sampler.recorded_turn import Call, Item, RecordedTurn, TurnItem
from sampler.tokenizer import Tokenizer
from tests.sampler.dialogues import Dialogue, dialogues
from tests.sampler.templates import (
    ALTERNATES,
    BYTE_LEVEL,
    BYTES_HF,
    QWEN,
    THINKS,
    NewTemplate,
    Template,
    formats,
    over_bytes,
    over_smollm2,
    read,
)
from tests.tiny_model import IM_END, WEATHER, byte_tokenizer

formats_over = cache(formats)
FORMATS = formats_over(over_bytes)
HELLO = Message("user", "Hi.")
OSLO = FunctionCall("call_1", "get_weather", '{"city": "Oslo"}')
PATCH = CustomToolCall("call_2", "apply_patch", "*** Begin Patch")
TIME = FunctionCall("call_3", "get_time", "{}")
COLD = CallOutput("call_1", "4")
DONE = CallOutput("call_2", "Done.")
NOON = CallOutput("call_3", "noon")


def sampled(tokenizer: Tokenizer, text: str = "", calls: Sequence[Call] = ()) -> RecordedTurn:
    """Return a turn whose ids are what encoding it gives."""
    said = (Message("assistant", text),) if text else ()
    written = text + "\n".join(map(call_text, calls))
    return RecordedTurn((*said, *calls), (*tokenizer.encode_text(written), IM_END))


def drifted(*items: TurnItem) -> RecordedTurn:
    """Return a turn whose ids are nothing like what encoding it gives."""
    return RecordedTurn(items, (7, 8, 9, IM_END))


def controls_in(ids: Sequence[int]) -> list[str]:
    return [name for i in ids for name, control in BYTE_LEVEL.added_tokens.items() if i == control]


def log_of(chat: ChatFormat, dialogue: Dialogue, **how: Any) -> list[int]:
    """Return the log of a run that was sampled from the head on and never interrupted."""
    log = chat.prompt_ids(Conversation(dialogue.head, **how))
    for exchange in dialogue.exchanges:
        log += exchange.turn.token_ids
        log += chat.suffix_ids(exchange.turn.calls, exchange.following)
    return log


# --- The log of an uninterrupted run -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("over", [over_bytes, over_smollm2])
@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), dialogue=dialogues())
def test_a_prompt_with_recorded_turns_is_the_log_of_an_uninterrupted_run(
    over: NewTemplate, name: str, dialogue: Dialogue
) -> None:
    chat = formats_over(over)[name]
    conversation = Conversation(dialogue.items(len(dialogue.exchanges)), "Be good.", [WEATHER])

    prompt = encode(chat, conversation)

    log = log_of(chat, dialogue, instructions="Be good.", tools=[WEATHER])
    assert list(prompt.token_ids) == log


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), dialogue=dialogues())
def test_going_on_from_what_is_known_gives_the_same_ids(name: str, dialogue: Dialogue) -> None:
    chat = FORMATS[name]
    prompt = encode(chat, Conversation(dialogue.items(0), "Be good.", [WEATHER]))

    for count, exchange in enumerate(dialogue.exchanges, 1):
        conversation = Conversation(dialogue.items(count), "Be good.", [WEATHER])
        prompt = encode(chat, conversation, known=prompt.after(exchange.turn))

        assert prompt == encode(chat, conversation)


TURNS: list[tuple[str, list[Call], list[InputItem]]] = [
    ("", [OSLO], [COLD]),
    ("", [PATCH, TIME], [DONE, Message("user", "Thanks!"), NOON]),
    ("Welcome.", [], [Message("user", "And 日本?")]),
]


@pytest.mark.slow
@pytest.mark.parametrize("over", [over_bytes, over_smollm2])
@pytest.mark.parametrize("name", ["ChatML", "Qwen", "no tools", "one with a date"])
def test_without_drift_a_prompt_is_what_laying_out_the_items_gives(
    over: NewTemplate, name: str
) -> None:
    chat, tokenizer = formats_over(over)[name], over(QWEN).tokenizer
    plain: list[Item] = [HELLO]
    recorded: list[Item] = [HELLO]
    for text, calls, following in TURNS:
        turn = sampled(tokenizer, text, calls)
        plain += [*turn.items, *following]
        recorded += [turn, *following]

    prompt = encode(chat, Conversation(recorded, "Be terse."))

    assert list(prompt.token_ids) == chat.prompt_ids(Conversation(plain, "Be terse."))


@pytest.mark.parametrize("name", FORMATS)
def test_however_a_client_writes_a_turn_its_ids_are_those_that_were_sampled(name: str) -> None:
    said = drifted(Message("assistant", "Hm."), OSLO)
    compact = FunctionCall("call_1", "get_weather", '{"city":"Oslo"}')
    echo = RecordedTurn((compact,), said.token_ids)

    prompt = encode(FORMATS[name], Conversation([HELLO, echo, COLD]))

    assert prompt.token_ids == encode(FORMATS[name], Conversation([HELLO, said, COLD])).token_ids


def test_thoughts_that_a_template_drops_stay_where_they_were_sampled() -> None:
    chat = over_bytes(THINKS).format()
    turn = sampled(BYTE_LEVEL, "<think>\nA secret.\n</think>\n\nHo.")

    prompt = encode(chat, Conversation([HELLO, turn, Message("user", "More.")]))
    plain = chat.prompt_ids(Conversation([HELLO, *turn.items, Message("user", "More.")]))

    assert "A secret." in read(BYTE_LEVEL, prompt.token_ids)
    assert "A secret." not in read(BYTE_LEVEL, plain)


# --- Shapes of conversations ---------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_without_recorded_turns_is_laid_out_as_it_is(name: str) -> None:
    conversation = Conversation([HELLO, Message("assistant", "Ho."), HELLO], "Be good.", [WEATHER])

    prompt = encode(FORMATS[name], conversation)

    assert prompt == TokenPrompt(conversation, tuple(FORMATS[name].prompt_ids(conversation)))


def test_an_empty_conversation_is_the_beginning_of_any_other() -> None:
    chat = ChatMLFormat(BYTE_LEVEL)

    warm_up = encode(chat, Conversation([], "Be good.", [WEATHER]))
    prompt = encode(chat, Conversation([HELLO], "Be good.", [WEATHER]))

    header = "⟦<|im_start|>⟧assistant\n"
    shared = read(BYTE_LEVEL, warm_up.token_ids).removesuffix(header)
    assert "get_weather" in shared
    assert read(BYTE_LEVEL, prompt.token_ids).startswith(shared)


def test_an_empty_conversation_that_a_template_refuses_is_an_error() -> None:
    with pytest.raises(ConversationError, match="refuses this"):
        encode(FORMATS["Qwen"], Conversation([], tools=[WEATHER]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("instructions", [None, "Be good."])
@pytest.mark.parametrize(
    "items", [[], [HELLO], [HELLO, drifted(OSLO), COLD]], ids=["nothing", "question", "output"]
)
def test_whatever_goes_on_from_a_conversation_begins_as_it_does(
    name: str, instructions: str | None, items: list[Item]
) -> None:
    conversation = Conversation(items, instructions, [WEATHER])

    beginning = encode_beginning(FORMATS[name], conversation).token_ids

    for text in ("Hi.", "a", "☀ <|im_end|>"):
        longer = replace(conversation, items=[*items, Message("user", text)])
        assert encode(FORMATS[name], longer).token_ids[: len(beginning)] == beginning
    assert (instructions or "") in read(BYTE_LEVEL, beginning)


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_may_begin_with_a_recorded_turn(name: str) -> None:
    chat, turn = FORMATS[name], drifted(OSLO)
    begun = encode(chat, Conversation([Message("system", "Be good.")]))

    prompt = encode(chat, Conversation([turn, COLD], "Be good."))

    suffix = chat.suffix_ids([OSLO], [COLD])
    assert prompt.token_ids == (*begun.token_ids, *turn.token_ids, *suffix)


@pytest.mark.parametrize("name", FORMATS)
def test_two_recorded_turns_in_a_row_have_the_prompt_of_the_second_between_them(name: str) -> None:
    chat = FORMATS[name]
    one, two = drifted(Message("assistant", "a")), drifted(Message("assistant", "b"))

    prompt = encode(chat, Conversation([HELLO, one, two]))

    opening = chat.suffix_ids([], [])
    begun = chat.prompt_ids(Conversation([HELLO]))
    assert list(prompt.token_ids) == [*begun, *one.token_ids, *opening, *two.token_ids, *opening]
    assert controls_in(opening) == ["<|im_start|>"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_system_may_speak_in_the_middle(name: str) -> None:
    items: list[Item] = [HELLO, drifted(OSLO), COLD, Message("developer", "Be quick."), HELLO]

    prompt = encode(FORMATS[name], Conversation(items))

    assert "Be quick." in read(BYTE_LEVEL, prompt.token_ids)


@pytest.mark.parametrize("name", ["ChatML", "Qwen", "one that wants a call before an output"])
def test_a_call_may_be_answered_after_a_later_turn(name: str) -> None:
    chat = FORMATS[name]
    first, second = drifted(OSLO, PATCH), drifted(TIME)
    items: list[Item] = [HELLO, first, COLD, HELLO, second, NOON, DONE]

    prompt = encode(chat, Conversation(items))

    before = encode(chat, Conversation(items[:4])).token_ids
    suffix = chat.suffix_ids([PATCH, TIME], [DONE, NOON])
    assert prompt.token_ids == (*before, *second.token_ids, *suffix)


def test_an_output_that_answers_no_call_is_an_error() -> None:
    with pytest.raises(ConversationError, match="'call_2' answers no call"):
        encode(FORMATS["ChatML"], Conversation([HELLO, drifted(OSLO), COLD, DONE]))


def test_whether_to_think_is_asked_of_the_turn_to_come() -> None:
    chat = FORMATS["thoughts in the last turn"]
    conversation = Conversation([HELLO, drifted(OSLO), COLD], enable_thinking=False)

    text = read(BYTE_LEVEL, encode(chat, conversation).token_ids)

    assert text.endswith("⟦<|im_start|>⟧assistant\n<think>\n\n</think>\n\n")


# --- Going on from what is known -----------------------------------------------------------------


def test_after_a_turn_a_prompt_has_its_items_and_its_ids() -> None:
    prompt = encode(FORMATS["ChatML"], Conversation([HELLO], "Be good.", [WEATHER], False))
    turn = drifted(OSLO)

    after = prompt.after(turn)

    assert after.token_ids == prompt.token_ids + turn.token_ids
    assert list(after.conversation.items) == [HELLO, turn]
    assert replace(after.conversation, items=[HELLO]) == prompt.conversation


LONG: list[Item] = [
    HELLO,
    *(item for _ in range(20) for item in (drifted(Message("assistant", "Ho.")), HELLO)),
]


def work_of(
    chat: Callable[[Tokenizer], ChatFormat], act: Callable[[ChatFormat], object]
) -> Counters:
    """Return what ``act`` counts."""
    tokenizer = Tokenizer(byte_tokenizer(), [IM_END])
    own = chat(tokenizer)
    tokenizer.counters = Counters()
    act(own)
    return tokenizer.counters


@pytest.mark.parametrize(
    "chat",
    [
        ChatMLFormat,
        lambda tokenizer: Template(tokenizer, BYTES_HF, QWEN).format(),
        lambda tokenizer: Template(tokenizer, BYTES_HF, THINKS).format(),
        lambda tokenizer: Template(tokenizer, BYTES_HF, ALTERNATES).format(knows_tools=False),
    ],
    ids=["ChatML", "Qwen", "thoughts", "alternates"],
)
def test_going_on_takes_the_work_of_the_new_items_however_long_the_conversation(
    chat: Callable[[Tokenizer], ChatFormat],
) -> None:
    turn = drifted(OSLO)
    before = encode(FORMATS["ChatML"], Conversation(LONG, "Be good.", [WEATHER]))
    known = before.after(turn)
    longer = Conversation([*LONG, turn, COLD, HELLO], "Be good.", [WEATHER])

    work = work_of(chat, lambda own: encode(own, longer, known))

    assert work == work_of(chat, lambda own: own.suffix_ids([OSLO], [COLD, HELLO]))
    assert work.template_renders < work_of(chat, lambda own: encode(own, longer)).template_renders


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (Conversation([HELLO, drifted(OSLO), COLD], "Be bad.", [WEATHER]), "instructions"),
        (Conversation([HELLO, drifted(OSLO), COLD], "Be good."), "tools"),
        (Conversation([HELLO, drifted(OSLO), COLD], "Be good.", [WEATHER], False), "thinking"),
        (
            Conversation([Message("user", "Ho."), drifted(OSLO), COLD], "Be good.", [WEATHER]),
            "another beginning",
        ),
        (Conversation([HELLO], "Be good.", [WEATHER]), "less than is known"),
        (Conversation([HELLO, OSLO, COLD], "Be good.", [WEATHER]), "the turn written anew"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_known_of_another_conversation_is_of_no_use(
    changed: Conversation, why: str
) -> None:
    chat = FORMATS["ChatML"]
    known = TokenPrompt(Conversation([HELLO, drifted(OSLO)], "Be good.", [WEATHER]), (1, 2, 3, 4))

    assert encode(chat, changed, known) == encode(chat, changed), why
    assert longest_known(changed, [known]) is None


def test_a_prompt_that_waits_for_its_turn_is_not_gone_on_from() -> None:
    chat = FORMATS["ChatML"]
    known = TokenPrompt(Conversation([HELLO]), (1, 2, 3))

    assert encode(chat, Conversation([HELLO, HELLO]), known) == encode(
        chat, Conversation([HELLO, HELLO])
    )


def test_of_several_known_prompts_the_longest_saves_most() -> None:
    chat = FORMATS["ChatML"]
    one = encode(chat, Conversation([HELLO])).after(drifted(OSLO))
    two = encode(chat, Conversation([HELLO, drifted(OSLO), COLD])).after(drifted(PATCH))
    other = encode(chat, Conversation([HELLO] * 9)).after(drifted(OSLO))
    conversation = Conversation([HELLO, drifted(OSLO), COLD, drifted(PATCH), DONE])

    assert longest_known(conversation, [one, two, other]) is two
    assert longest_known(conversation, []) is None


# --- Fitting a limit -----------------------------------------------------------------------------

EXCHANGES: list[Item] = [
    item
    for index in range(12)
    for item in (Message("user", f"Question {index}?"), drifted(Message("assistant", "Yes.")))
]
TALK = Conversation([*EXCHANGES, Message("user", "Why?")], "Be good.", [WEATHER])


def questions_in(prompt: TokenPrompt) -> list[int]:
    text = read(BYTE_LEVEL, prompt.token_ids)
    return [index for index in range(12) if f"Question {index}?" in text]


def test_a_conversation_that_fits_is_left_as_it_is() -> None:
    whole = encode(FORMATS["ChatML"], TALK)

    assert fit(FORMATS["ChatML"], TALK, len(whole.token_ids)) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_of_a_conversation_that_is_too_long_the_oldest_exchanges_are_left_out(name: str) -> None:
    chat = FORMATS[name]
    limit = len(encode(chat, TALK).token_ids) - 1

    for _ in range(3):
        prompt = fit(chat, TALK, limit)
        left = questions_in(prompt)

        assert len(prompt.token_ids) <= limit
        assert left == list(range(12 - len(left), 12))
        assert prompt == encode(chat, prompt.conversation)
        assert "Why?" in read(BYTE_LEVEL, prompt.token_ids)
        assert prompt.token_ids[:9] == encode(chat, TALK).token_ids[:9]
        limit -= 100


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1200))
def test_no_more_is_left_out_than_must_be(limit: int) -> None:
    chat = FORMATS["ChatML"]
    lengths = {
        count: len(encode(chat, replace(TALK, items=TALK.items[2 * count :])).token_ids)
        for count in range(13)
    }

    left = questions_in(fit(chat, TALK, limit))

    fitting = [count for count, length in lengths.items() if length <= limit]
    assert len(left) == 12 - min(fitting, default=12)


def test_fitting_takes_few_encodes() -> None:
    items = [*EXCHANGES * 20, Message("user", "Why?")]

    work = work_of(ChatMLFormat, lambda chat: fit(chat, Conversation(items), 500))

    assert work.template_renders <= 1 + 8  # the whole, and a bisection of 240


def test_what_cannot_be_left_out_is_returned_however_long_it_is() -> None:
    chat = FORMATS["ChatML"]

    prompt = fit(chat, TALK, 10)

    assert prompt == encode(chat, replace(TALK, items=TALK.items[-1:]))
    assert len(prompt.token_ids) > 10
    assert fit(chat, Conversation([HELLO]), 10) == encode(chat, Conversation([HELLO]))


def test_a_whole_conversation_goes_on_from_what_is_known_before_anything_is_left_out() -> None:
    turn = drifted(OSLO)
    known = encode(FORMATS["ChatML"], Conversation(LONG)).after(turn)
    longer = Conversation([*LONG, turn, COLD])

    work = work_of(ChatMLFormat, lambda chat: fit(chat, longer, 100_000, known))

    assert work.template_renders == 0
