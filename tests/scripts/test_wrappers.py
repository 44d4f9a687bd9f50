"""The commands work in whatever directory they are called, and paths are relative to that."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

pytestmark = pytest.mark.slow


def run(command: str, *arguments: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [SCRIPTS / command, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", ["api-key", "bench", "conform", "demo", "serve", "usage"])
def test_a_command_can_be_called_from_elsewhere(command: str, tmp_path: Path) -> None:
    for name in ("scripts", "server", "sampler", "protocol"):  # none of which is to be imported
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")

    ended = run(command, "--help", directory=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert "Usage" in ended.stdout


def test_a_file_is_written_where_the_caller_is(tmp_path: Path) -> None:
    ended = run("compare", "--quick", "--write-traces", "traces.jsonl", directory=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "traces.jsonl").exists()
