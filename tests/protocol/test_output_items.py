from typing import Any

import msgspec
import pytest

from protocol.codec import encode
from protocol.items import (
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    Message,
    ReasoningItem,
)
from protocol.output_items import (
    OutputCompaction,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputRefusal,
    OutputText,
    ReasoningText,
    SummaryText,
    as_input,
)
from protocol.sealed import seal
from protocol.server_events import CustomToolCallOutputStub, FunctionCallOutputStub, output_stub
from tests.protocol.streams import LOGPROB, everything, new_stream


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (
            OutputMessage("i", "completed", (OutputText("a"), OutputRefusal("b"))),
            Message("assistant", "ab", "i"),
        ),
        (
            OutputFunctionCall("i", "c", "f", "{}", "completed"),
            FunctionCall("c", "f", "{}", None, "i"),
        ),
        (
            OutputFunctionCall("i", "c", "f", "{}", "completed", "n"),
            FunctionCall("c", "f", "{}", "n", "i"),
        ),
        (
            OutputCustomToolCall("i", "c", "f", "x", "completed"),
            CustomToolCall("c", "f", "x", None, "i"),
        ),
        (
            OutputCustomToolCall("i", "c", "f", "x", "completed", "n"),
            CustomToolCall("c", "f", "x", "n", "i"),
        ),
        (
            OutputReasoning("i", "completed", content=(ReasoningText("a"),)),
            ReasoningItem("a", "i"),
        ),
        (
            OutputReasoning("i", "completed", summary=(SummaryText("a"), SummaryText("b"))),
            ReasoningItem("ab", "i"),
        ),
        (OutputCompaction("i", seal("They talked."), "completed"), Compaction("They talked.", "i")),
    ],
)
def test_what_was_said_goes_on_in_the_conversation(said: OutputItem, heard: InputItem) -> None:
    assert as_input(said) == heard


@pytest.mark.parametrize("options", [{}, {"reasoning_as_summary": True, "seals_reasoning": True}])
def test_what_was_written_can_be_read_back(options: dict[str, Any]) -> None:
    stream = new_stream(**options)
    everything(stream)

    stored = encode(stream.output)

    assert msgspec.json.decode(stored, type=tuple[OutputItem, ...]) == stream.output


def test_log_probabilities_can_be_read_back() -> None:
    part = OutputText("a", logprobs=(LOGPROB,))

    assert msgspec.json.decode(encode(part), type=OutputText) == part


@pytest.mark.parametrize(
    ("call", "stub"),
    [
        (
            OutputFunctionCall("i", "c", "f", "{}", "completed"),
            FunctionCallOutputStub("c", "f"),
        ),
        (OutputCustomToolCall("i", "c", "f", "x", "completed"), CustomToolCallOutputStub("c")),
    ],
)
def test_a_call_asks_for_its_output(
    call: OutputFunctionCall | OutputCustomToolCall,
    stub: FunctionCallOutputStub | CustomToolCallOutputStub,
) -> None:
    assert output_stub(call) == stub
