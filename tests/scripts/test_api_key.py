"""``scripts/api-key`` shows a key once, and the server knows it from then on."""

from pathlib import Path

import pytest

from scripts.api_key import main
from server.access import ApiKeys


def test_the_key_is_all_that_is_printed_and_the_server_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main("alice", tmp_path / "keys")

    (key,) = capsys.readouterr().out.splitlines()
    assert ApiKeys.from_file(tmp_path / "keys").authenticate(f"Bearer {key}") == "alice"


def test_a_second_key_for_a_name_is_made_and_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alice", "bob", "alice"):
        main(name, tmp_path / "keys")

    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3
    (line,) = told.err.splitlines()
    assert line.startswith("api-key: alice has 2 keys now")


def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="api-key: expected a name"):
        main("a b", tmp_path / "keys")

    assert capsys.readouterr().out == ""
