"""The agent loop against a made-up server, and what is added up and shown of it."""

import io

import pytest
from rich.console import Console

from protocol.client_events import parse_append, parse_create
from protocol.tools import ToolChoiceMode
from scripts.demo_agent import Agent, AgentError, AgentOptions
from scripts.demo_record import Run, Totals, sum_of, totals_of
from scripts.demo_screen import Screen
from scripts.demo_tools import BUNDLED_FOLDER, toolbox
from tests.scripts.canned import CannedSocket, call, closed, created, one_call, text


def agent(
    socket: CannedSocket, options: AgentOptions | None = None, console: Console | None = None
) -> Agent:
    screen = Screen(console or Console(quiet=True))
    return Agent(socket, toolbox(BUNDLED_FOLDER), screen, options or AgentOptions())


async def run_of(socket: CannedSocket) -> Run:
    return await agent(socket).ask("What is 6 * 7?")


# ---- the loop


async def test_a_run_is_created_once_and_continued_by_appends_of_the_outputs_alone() -> None:
    socket = one_call()

    run = await run_of(socket)

    create, append = socket.sent
    assert create["type"] == "response.create"
    assert create["input"][-1]["content"] == "What is 6 * 7?"
    assert append == {
        "type": "response.append",
        "input": [{"type": "function_call_output", "call_id": "call_1", "output": "42"}],
    }
    assert (run.text, run.status) == ("It is 42.", "completed")
    assert [(c.name, c.output) for c in run.calls] == [("math", "42")]


async def test_what_is_sent_is_valid_for_the_server() -> None:
    socket = one_call()

    await agent(socket, AgentOptions(seed=7, model="m", max_calls=1)).ask("?")

    params = parse_create(socket.sent[0], transport="websocket", default_model="other")
    assert (params.model, params.seed, params.temperature) == ("m", 7, 0.0)
    assert params.tool_choice.mode is ToolChoiceMode.REQUIRED
    append = parse_append(socket.sent[1], params.tools)
    assert append.tool_choice is not None
    assert append.tool_choice.mode is ToolChoiceMode.NONE


async def test_calls_are_forbidden_from_the_cap_on_and_not_before() -> None:
    calls = [
        [
            *call(f"c{i}", "math", '{"expression": "1"}'),
            *closed("done", input_tokens=1, output_tokens=1),
        ]
        for i in range(3)
    ]
    answer = [*text("1"), *closed("completed", input_tokens=1, output_tokens=1)]
    socket = CannedSocket(*calls, answer)

    await agent(socket, AgentOptions(max_calls=3)).ask("?")

    assert [event.get("tool_choice") for event in socket.sent] == ["required", None, None, "none"]


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "error", "error": {"message": "no such model"}},
        {"type": "response.failed", "response": {"error": {"message": "no such model"}}},
    ],
)
async def test_what_the_server_refuses_is_an_error_in_its_words(answer: dict[str, object]) -> None:
    with pytest.raises(AgentError, match=r"^no such model$"):
        await run_of(CannedSocket([*created(), answer]))


async def test_a_server_that_does_not_report_on_runs_is_an_error() -> None:
    socket = CannedSocket([{"type": "response.completed", "response": {"usage": {}}}])

    with pytest.raises(AgentError, match="suspend:run"):
        await run_of(socket)


# ---- the numbers


async def test_the_totals_of_a_run_are_those_of_its_segments() -> None:
    run = await run_of(one_call())

    totals = totals_of(run)

    assert totals.tokens_prefilled == 100 + (130 - 119)
    assert totals.tokens_decoded == 20 + 5
    assert totals.stateless_tokens_prefilled == 100 + 130
    assert totals.final_tokens == 135
    assert totals.tokens_forwarded == 134
    assert totals.suspensions == 1
    assert totals.suspended_seconds == 0.25
    assert totals.server_resume_seconds == (0.1,)
    assert totals.resume_seconds == (run.segments[1].first_event_seconds,)
    assert run.segments[0].tokens_held == 119


async def test_tokens_forwarded_again_are_the_servers_count() -> None:
    run = await run_of(
        CannedSocket(
            [*closed("done", input_tokens=9, output_tokens=1, forwarded=9)],
            [*closed("completed", input_tokens=12, output_tokens=1, forwarded=21, reforwarded=9)],
        )
    )

    assert totals_of(run).tokens_reforwarded == 9
    assert run.segments[1].tokens_held == 12


def test_totals_add_up() -> None:
    one = Totals(1, 2, 3, 4, 5, 6, 7, 0.5, (0.1,), (0.2, 0.3))

    assert sum_of([one, one]) == Totals(
        2, 4, 6, 8, 10, 12, 14, 1.0, (0.1, 0.1), (0.2, 0.3, 0.2, 0.3)
    )


# ---- what is shown


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_a_run_is_shown_step_by_step(console: Console) -> None:
    await agent(one_call(), console=console).ask("What is 6 * 7?")

    lines = shown(console).split("\n")
    assert lines[1] == "question   What is 6 * 7?"
    assert lines[2] == 'call       math({"expression": "6 * 7"})'
    assert lines[3] == "suspended  119 tokens kept in the KV cache, nothing computed"
    assert lines[4] == "tool       42"
    assert lines[5].startswith("resumed    first new token ")
    assert lines[6:] == ["answer     It is 42.", ""]


async def test_the_table_has_a_row_for_each_run_and_one_for_all(console: Console) -> None:
    runs = [await run_of(one_call()), await run_of(one_call())]

    Screen(console).summary(runs)

    rows = [line.split() for line in shown(console).splitlines()]
    assert [row[:5] for row in rows if row[:1] == ["2"]] == [["2", "111", "25", "0", "230"]]
    assert [row[:5] for row in rows if row[:1] == ["total"]] == [["total", "222", "50", "0", "460"]]
    assert "…" not in shown(console)
    assert "canned suspended 2 times" in shown(console)
    assert "2.1 times as much" in shown(console)


async def test_a_run_without_a_call_is_shown_too(console: Console) -> None:
    socket = CannedSocket(
        [*text("Hm"), *closed("incomplete", input_tokens=10, output_tokens=1, forwarded=10)]
    )

    run = await agent(socket, console=console).ask("?")
    Screen(console).summary([run])

    assert "answer     Hm\n(incomplete: " in shown(console)
    assert "suspended 0 times" in shown(console)


async def test_what_would_steer_the_terminal_is_not_shown(console: Console) -> None:
    socket = CannedSocket(
        [*text("a\x1b[2Jb [red]c[/red]"), *closed("completed", input_tokens=1, output_tokens=1)]
    )

    await agent(socket, console=console).ask("?")

    assert "a\ufffd[2Jb [red]c[/red]" in shown(console)
