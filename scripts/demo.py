"""``scripts/demo``: start the server, run an agent with three local tools, show what it cost.

Each question is one run of the sampler. At a tool call the response is suspended: the server keeps
the run's KV cache and computes nothing, this process runs the tool and appends its output, and the
sampler goes on from the very token it stopped at.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# scripts/demo starts Python with -P, and scripts/ is no installed package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from scripts.demo_agent import Agent, AgentError, AgentOptions
from scripts.demo_prompt import DEFAULT_QUESTIONS
from scripts.demo_record import Run, sum_of, totals_of
from scripts.demo_screen import Screen
from scripts.demo_tools import BUNDLED_FOLDER, Toolbox, toolbox
from scripts.local_server import (
    API_KEY_VARIABLE,
    ServerError,
    connection,
    given_server,
    running_server,
    server_command,
)
from server.command_options import DeviceName, DtypeName, parse_threads

INTERRUPTED = 130
"""Exit status, as shells give it after Ctrl-C."""


def main(
    question: Annotated[
        list[str] | None,
        typer.Option(help="Ask this; repeatable.", show_default="one question per tool"),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            exists=True,
            file_okay=False,
            help="All that the file tool can read.",
            show_default="a bundled one",
        ),
    ] = BUNDLED_FOLDER,
    model: Annotated[
        str | None,
        typer.Option(help="A local path or Hugging Face id.", show_default="the embedded model"),
    ] = None,
    device: Annotated[
        DeviceName | None,
        typer.Option(help="Where the model runs.", show_default="auto"),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(help="Of the weights.", show_default="auto"),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            parser=parse_threads,
            metavar="auto|NUMBER",
            help="CPU threads of the model.",
            show_default="auto",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Use the server at this URL.", show_default="one is started and stopped"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="For the server at --url.", show_default="none"),
    ] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Tool calls for each question.")] = 8,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Matters above temperature 0.", show_default="the server's"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Watch an agent run as one long-lived response that is suspended at each tool call."""
    if url is not None:
        _refuse_options_of_a_start(device=device, dtype=dtype, threads=threads)
    options = AgentOptions(
        max_calls=max_calls,
        temperature=temperature,
        seed=seed,
        # A server that is started here has one model; of another one, this is asked for by name.
        model=None if url is None else model,
    )
    command = server_command(server_options(model, device, dtype, threads))
    server = running_server(command) if url is None else given_server(url)
    screen = Screen(Console(quiet=as_json))
    try:
        runs = asyncio.run(
            run_demo(
                server,
                question or DEFAULT_QUESTIONS,
                toolbox(folder),
                screen,
                options,
                # A server that is started here knows no keys, and that of another is not its.
                api_key=None if url is None else api_key,
            )
        )
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.note("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except (AgentError, ServerError) as error:
        raise SystemExit(f"demo: {error}") from error
    if as_json:
        print(as_document(runs))
    else:
        screen.summary(runs)


def _refuse_options_of_a_start(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{name} is for a server that is started here, not --url")


def server_options(
    model: str | None, device: str | None, dtype: str | None, threads: int | None
) -> list[str]:
    """Return the options that a server is started with: those that were given."""
    options = {"--model": model, "--device": device, "--dtype": dtype, "--threads": threads}
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    return [word for option in given for word in option]


async def run_demo(
    server: AbstractAsyncContextManager[str],
    questions: Sequence[str],
    tools: Toolbox,
    screen: Screen,
    options: AgentOptions,
    *,
    api_key: str | None = None,
) -> list[Run]:
    """Ask all questions over one connection, one after the other.

    On cancellation, which is also what SIGTERM and a closed terminal become, the connection is
    closed and the server stopped.

    Raises:
        ServerError: there is no server, or the connection to it broke.
        AgentError: the server refused or failed a run.
    """
    _cancel_on(signal.SIGTERM, signal.SIGHUP)
    screen.note("waiting for the server")
    async with server as url, connection(url, api_key) as socket:
        screen.note(f"connected to {url}")
        agent = Agent(socket, tools, screen, options)
        return [await agent.ask(question) for question in questions]


def _cancel_on(*numbers: signal.Signals) -> None:
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def as_document(runs: Sequence[Run]) -> str:
    """Return everything about ``runs`` as one JSON document."""
    total = sum_of([totals_of(run) for run in runs])
    return json.dumps({"runs": [run.as_json() for run in runs], "total": total.as_json()}, indent=2)


if __name__ == "__main__":
    typer.run(main)
