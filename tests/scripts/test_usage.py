"""``scripts/usage`` shows what a data directory says, whoever uses it."""

import json
from contextlib import closing
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from scripts.usage import main
from server.ledger import Ledger, RunOpened, SegmentUsage
from server.prices import Price

app = typer.Typer()
app.command()(main)

PRICES = {"cheap": Price(Decimal("0.1"), Decimal("0.01"), Decimal("0.4"))}
NEW_YEAR = datetime(2026, 1, 1).astimezone()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with closing(Ledger(tmp_path, PRICES)) as ledger:
        play(ledger, "run_1", "ada", "cheap", 1_000_000)
        play(ledger, "run_2", "ada", "dear", int(NEW_YEAR.timestamp()))
        play(ledger, "run_3", "", "cheap", int(NEW_YEAR.timestamp()) - 1)
    return tmp_path


def play(
    ledger: Ledger,
    run_id: str,
    key: str,
    model: str,
    created_at: int,
    *,
    is_simulated: bool = False,
) -> None:
    run = RunOpened(
        run_id=run_id,
        key=key,
        model=model,
        requested_model=model,
        design="append",
        created_at=created_at,
        is_simulated=is_simulated,
    )
    usage = SegmentUsage(
        index=0,
        input_tokens=1200,
        cached_tokens=200,
        output_tokens=100,
        reasoning_tokens=0,
        seconds=1.0,
    )
    ledger.segment(run, usage)
    ledger.finish(run, "completed")


def usage(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_table_has_a_row_for_each_key_and_model(data_dir: Path) -> None:
    result = usage("--data-dir", data_dir)

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    assert [row for row in rows if row] == [
        ["(none)", "cheap", "1", "1", "1,200", "200", "100", "0", "0.000142"],
        ["ada", "cheap", "1", "1", "1,200", "200", "100", "0", "0.000142"],
        ["ada", "dear", "1", "1", "1,200", "200", "100", "0", "no price"],
    ]


@pytest.mark.parametrize("name", ["org/m[int8]", "runs/[/old]/m", "ft:m:smile:x"])
def test_a_name_is_shown_as_it_is(name: str, data_dir: Path) -> None:
    with closing(Ledger(data_dir, PRICES)) as ledger:
        play(ledger, "run_4", "eve", name, 1_000_000)

    assert f" {name} " in usage("--data-dir", data_dir, "--key", "eve").output


def test_a_day_that_no_clock_has_is_refused(data_dir: Path) -> None:
    result = usage("--data-dir", data_dir, "--since", "0001-01-01")

    assert result.exit_code == 2
    assert "--since" in result.output


@pytest.mark.parametrize(("is_terminal", "num_lines"), [(True, 8), (False, 1)])
def test_a_narrow_terminal_has_cells_folded_and_nothing_is_cut_off(
    is_terminal: bool,
    num_lines: int,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing(Ledger(data_dir, PRICES)) as ledger:
        play(ledger, "run_4", "a-key-with-a-long-name", "a-model-with-a-very-long-name", 1_000_000)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "60")

    main(data_dir, key="a-key-with-a-long-name")

    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if line]
    assert len(rows) == num_lines
    assert ["".join(column) for column in zip(*rows, strict=True)] == [
        *("a-key-with-a-long-name", "a-model-with-a-very-long-name"),
        *("1", "1", "1,200", "200", "100", "0", "no price" if not is_terminal else "noprice"),
    ]


def test_a_sum_says_what_is_not_in_it(data_dir: Path) -> None:
    with closing(Ledger(data_dir, {})) as ledger:
        play(ledger, "run_4", "ada", "cheap", 1_000_000)

    result = usage("--data-dir", data_dir, "--key", "ada")

    assert "0.000142 and 1 unpriced" in result.output


def test_json_is_one_line_of_exact_numbers(data_dir: Path) -> None:
    result = usage("--data-dir", data_dir, "--json", "--key", "ada", "--since", "2025-01-01")

    (line,) = result.output.splitlines()
    assert json.loads(line) == [
        {
            "key": "ada",
            "model": "dear",
            "num_runs": 1,
            "num_segments": 1,
            "input_tokens": 1200,
            "cached_tokens": 200,
            "output_tokens": 100,
            "reasoning_tokens": 0,
            "cost_nanodollars": None,
            "num_unpriced_runs": 1,
            "is_simulated": False,
        }
    ]


def test_what_was_made_up_says_so_beside_its_price(data_dir: Path) -> None:
    with closing(Ledger(data_dir, PRICES)) as ledger:
        play(ledger, "run_4", "ada", "cheap", 1_000_000, is_simulated=True)

    table = usage("--data-dir", data_dir, "--key", "ada").output
    totals = json.loads(usage("--data-dir", data_dir, "--key", "ada", "--json").output)

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    assert [(row[1], row[-1]) for row in rows if row] == [
        ("cheap", "0.000142"),
        ("cheap (simulated)", "0.000142"),
        ("dear", "no price"),
    ]
    assert [total["is_simulated"] for total in totals] == [False, True, False]


def test_runs_count_from_the_beginning_of_the_day(data_dir: Path) -> None:
    result = usage("--data-dir", data_dir, "--json", "--since", "2026-01-01")

    assert [total["model"] for total in json.loads(result.output)] == ["dear"]


def test_where_nothing_counts_it_says_so(data_dir: Path) -> None:
    assert usage("--data-dir", data_dir, "--key", "bob").output == "no runs\n"


async def test_it_reads_beside_a_server_that_writes(data_dir: Path) -> None:
    with closing(Ledger(data_dir, PRICES)) as ledger:
        play(ledger, "run_4", "bob", "cheap", 1_000_000)
        await ledger.settled()

        result = usage("--data-dir", data_dir, "--key", "bob", "--json")

    assert [total["num_runs"] for total in json.loads(result.output)] == [1]


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"usage: the ledger: .*ledger\.sqlite"):
        main(tmp_path)
