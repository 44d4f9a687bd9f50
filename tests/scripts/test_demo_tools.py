"""The tools answer with text, whatever they are asked, and give nothing away."""

import json
import os
from pathlib import Path

import pytest

from scripts.demo_tools import (
    BUNDLED_FOLDER,
    FileReader,
    ToolError,
    Weather,
    calculate,
    toolbox,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "note.txt").write_text("hello\n", encoding="utf-8")
    (folder / "deep" / "note.txt").write_text("deep hello", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    (tmp_path / "folder2").mkdir()
    (tmp_path / "folder2" / "secret.txt").write_text("secret", encoding="utf-8")
    return folder


# ---- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("4173 * 29", "121017"),
        ("1 + 2 * (3 - -4)", "15"),
        (" 12 / 4 ", "3"),
        ("986 / 4", "246.5"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        ("2^10", "1024"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("2 ** 0.5", "1.414213562"),
        ("10 ** -2", "0.01"),
        ("1 ** 1e9", "1"),
        ("10 ** 99", "1" + 99 * "0"),
    ],
)
def test_the_calculator_evaluates_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "x + 1",
        "__import__('os').system('true')",
        "abs(-1)",
        "(1).real",
        "[1][0]",
        "'a' * 3",
        "True + 1",
        "1j * 1j",
        "1 if 1 else 2",
        "1 < 2",
        "~1",
        "1 << 9",
        "(x := 1)",
    ],
)
def test_the_calculator_understands_nothing_but_numbers_and_operators(expression: str) -> None:
    with pytest.raises(ToolError, match="only numbers"):
        calculate(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
        ("12 = 12", "not an arithmetic expression"),
        (150 * "(" + "1" + 50 * ")", "at most"),
        (100 * "(" + "1", "not an arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "100 digits"),
        ("-9 ** 999999999", "100 digits"),
        ("(0 - 9) ** 999999999", "100 digits"),
        ("1.5 ** 1e300", "100 digits"),
        ("10 ** 60 * 10 ** 60", "100 digits"),
        ("1e999", "100 digits"),
        ("1e999 - 1e999", "100 digits"),
        (150 * "9", "100 digits"),
        ("(-8) ** 0.5", "not a real number"),
        ("(-8) ** 0.5 + 1", "not a real number"),
        ("1 + " * 60 + "1", "at most"),
    ],
)
def test_the_calculator_says_why_it_cannot(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression)


# ---- files


def test_files_of_the_folder_are_read(folder: Path) -> None:
    read = FileReader(folder)

    assert read("note.txt") == "hello"
    assert read("deep/note.txt") == "deep hello"
    assert read("deep/../note.txt") == "hello"
    assert read(str(folder / "note.txt")) == "hello"


@pytest.mark.parametrize(
    "path", ["../secret.txt", "deep/../../secret.txt", "../folder2/secret.txt"]
)
def test_paths_that_climb_out_of_the_folder_are_refused(folder: Path, path: str) -> None:
    with pytest.raises(ToolError, match="outside the folder"):
        FileReader(folder)(path)


def test_absolute_paths_out_of_the_folder_are_refused(folder: Path) -> None:
    with pytest.raises(ToolError, match="outside the folder"):
        FileReader(folder)(str(folder.parent / "secret.txt"))


def test_symlinks_out_of_the_folder_are_refused(folder: Path) -> None:
    (folder / "file_link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "folder_link").symlink_to(folder.parent, target_is_directory=True)
    (folder / "inner_link.txt").symlink_to("note.txt")
    read = FileReader(folder)

    for path in ("file_link.txt", "folder_link/secret.txt"):
        with pytest.raises(ToolError, match="outside the folder"):
            read(path)
    assert read("inner_link.txt") == "hello"


def test_a_folder_that_is_itself_behind_a_symlink_is_read(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder, target_is_directory=True)

    assert FileReader(link)("note.txt") == "hello"


def test_a_missing_file_is_answered_with_those_there_are(folder: Path) -> None:
    with pytest.raises(ToolError, match=r"no file 'nope.txt'; there are: note.txt$"):
        FileReader(folder)("nope.txt")


def test_folders_pipes_binary_files_and_strange_paths_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "loop").symlink_to("loop")
    read = FileReader(folder)

    for path in ("", "deep", "pipe", "binary", "loop", "a\0b", 300 * "x", "~/x"):
        with pytest.raises(ToolError):
            read(path)


def test_a_long_file_is_cut(folder: Path) -> None:
    (folder / "long.txt").write_text(5000 * "x", encoding="utf-8")

    assert FileReader(folder)("long.txt") == f"{2000 * 'x'} [cut]"


# ---- weather


def test_a_city_is_found_however_it_is_written() -> None:
    weather = Weather({"New York": "16 degrees, sunny"})

    for city in ("New York", "new york", " New York ", "New York, USA"):
        assert weather(city) == "New York: 16 degrees, sunny"


def test_an_unknown_city_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ToolError, match=r"no weather for 'Atlantis'; known are: Oslo, Rome"):
        Weather({"Oslo": "rain", "Rome": "sun"})("Atlantis")


# ---- the toolbox


def test_the_bundled_data_answer() -> None:
    tools = toolbox(BUNDLED_FOLDER)

    assert tools.call("math", '{"expression": "1 + 1"}') == "2"
    assert tools.call("file", '{"path": "todo.txt"}').startswith("Call Anna")
    assert tools.call("weather", '{"city": "Oslo"}') == "Oslo: 7 degrees, light rain"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("math", '{"expression": "1 / 0"}'),
        ("math", "{"),
        pytest.param("math", "[" * 100_000, id="deep"),
        ("math", "[]"),
        ("math", "{}"),
        ("math", '{"expression": 1}'),
        ("rm", '{"path": "/"}'),
    ],
)
def test_a_call_that_fails_is_answered_with_the_reason(name: str, arguments: str) -> None:
    assert toolbox(BUNDLED_FOLDER).call(name, arguments).startswith("error: ")


def test_the_tools_are_declared_with_closed_schemas() -> None:
    definitions = toolbox(BUNDLED_FOLDER).definitions()

    assert [definition["name"] for definition in definitions] == ["math", "file", "weather"]
    for definition in definitions:
        parameters = json.loads(json.dumps(definition))["parameters"]
        assert parameters["required"] == list(parameters["properties"])
        assert parameters["additionalProperties"] is False
