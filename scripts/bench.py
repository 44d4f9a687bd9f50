"""Benchmarks: sections of figures, as tables for people and, in the last line, JSON for programs.

Whatever is compared is measured in one run, in turns, and shown as the median with the lowest and
the highest sample. A row or column named "again" is the same thing measured once more: what it
differs by is noise.
"""

import importlib
import json
import sys
import time
import traceback
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console

# scripts/bench starts Python with -P, and scripts/ is no installed package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from scripts.benchmarks.bench import Bench
from scripts.benchmarks.llama_cpp import find_python
from scripts.benchmarks.machine import Neighbours, machine, versions
from scripts.benchmarks.section import Section
from scripts.local_server import ServerError, server_url

SECTIONS = (
    "speed",
    "batching",
    "resume",
    "exact",
    "policies",
    "designs",
    "server-cost",
    "suspended-sockets",
)

_MANY_BUSY_CORES = 0.15
"""With more than that, other programs are felt in the figures."""

_PATIENCE_SECONDS = 10.0


def _there(url: str | None) -> str | None:
    """Make sure that a server of ours is there before anything is measured, and return its URL.

    Raises:
        BadParameter: none answers, or another.
    """
    if url is None:
        return None
    try:
        url = server_url(url)
        answer = httpx2.get(f"{url}/health", timeout=_PATIENCE_SECONDS)
    except ServerError as error:
        raise typer.BadParameter(str(error)) from None
    except (httpx2.RequestError, httpx2.InvalidURL) as error:
        raise typer.BadParameter(f"cannot connect to {url}: {error}") from None
    if answer.status_code != HTTPStatus.OK:
        told = f"{url}/health answered {answer.status_code}; is it a server of this project?"
        raise typer.BadParameter(told)
    return url


def main(
    sections: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION]...", help=f"Of {', '.join(SECTIONS)}; all by default."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About two minutes in all.")] = False,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of each section.", show_default="its own number"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of our runner.", show_default="what it chooses")
    ] = None,
    reference_threads: Annotated[
        int, typer.Option(min=1, help="Of transformers and of llama.cpp.")
    ] = 2,
    llama_cpp_python: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The interpreter whose environment holds llama-cpp-python.",
            show_default="this one, if it does",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            callback=_there,
            help="A server that runs already, for 'designs'.",
            show_default="our own",
        ),
    ] = None,
) -> None:
    """Measure and print."""
    names = _known(sections or list(SECTIONS))
    if url is not None and "designs" not in names:
        raise typer.BadParameter("--url goes with the section 'designs' only")
    console = Console(width=None if sys.stdout.isatty() else 160)
    bench = Bench(
        is_quick=quick,
        repeats=repeats,
        threads=threads,
        reference_threads=reference_threads,
        llama_cpp_python=find_python(llama_cpp_python),
        url=url,
    )
    report: dict[str, Any] = {"quick": quick, "machine": machine(), "sections": {}, "failed": {}}
    console.print(_headline(report["machine"], bench))
    with bench:
        for name in names:
            try:
                report["sections"][name] = measure(name, bench, console)
            except Exception as error:  # noqa: BLE001  what the others measured is not to be lost
                traceback.print_exc()
                report["failed"][name] = f"{type(error).__name__}: {error}"
        report["versions"] = versions() | _llama_cpp_version(bench)
    sys.stdout.write(json.dumps(report) + "\n")
    if report["failed"]:
        raise typer.Exit(1)


def measure(name: str, bench: Bench, console: Console) -> dict[str, Any]:
    """Measure one section, print it, and return it for programs."""
    neighbours, began_at = Neighbours(), time.monotonic()
    unsettled_before = bench.num_unsettled
    module = importlib.import_module(f"scripts.benchmarks.{name.replace('-', '_')}")
    section: Section = module.run(bench)
    busy_cores = neighbours.busy_cores()
    if busy_cores > _MANY_BUSY_CORES:
        section.notes.append(f"other programs kept {busy_cores:.1f} cores busy: mostly noise")
    if unsettled := bench.num_unsettled - unsettled_before:
        section.notes.append(f"{unsettled} times something measured before was still computing")
    seconds = time.monotonic() - began_at
    console.print(f"\n[bold]{section.name}[/bold]: {section.title} ({seconds:.0f} s)")
    for grid in section.grids:
        console.print(grid.table())
    for key, value in section.settings.items():
        console.print(f"  {key.replace('_', ' ')}: {value}", highlight=False)
    for note in section.notes:
        console.print(f"  {note}", highlight=False)
    return section.as_json() | {
        "seconds": round(seconds, 1),
        "busy_cores_of_others": round(busy_cores, 2),
    }


def _known(names: list[str]) -> list[str]:
    for name in names:
        if name not in SECTIONS:
            raise typer.BadParameter(
                f"there is no section {name!r}; there are {', '.join(SECTIONS)}"
            )
    return list(dict.fromkeys(names))


def _headline(facts: dict[str, Any], bench: Bench) -> str:
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"load {facts['load_average'][0]}; threads: ours {bench.threads}, "
        f"transformers and llama.cpp {bench.reference_threads}; environment: "
        f"{facts['environment'] or 'no OpenMP settings'}"
    )


def _llama_cpp_version(bench: Bench) -> dict[str, str]:
    llama_cpp = bench.started_llama_cpp
    if llama_cpp is None:
        return {}
    return {"llama-cpp-python": llama_cpp.version, "llama.cpp": llama_cpp.system}


if __name__ == "__main__":
    typer.run(main)
