"""The demo's three tools. They run on this side of the socket, while the sampler is suspended.

A tool answers with text, also when it fails: the model reads the error and can say so.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

DATA = Path(__file__).resolve().parent / "demo_data"
BUNDLED_FOLDER = DATA / "folder"


class ToolError(Exception):
    """A tool cannot do what it was asked; the model gets to read why."""


class Function(Protocol):
    """What a tool does with its one argument.

    Raises:
        ToolError: it cannot be done.
    """

    def __call__(self, argument: str, /) -> str: ...


@dataclass(frozen=True)
class Tool:
    """A function of one string, with what the model is told about it."""

    name: str
    description: str
    argument: str
    function: Function

    def definition(self) -> dict[str, Any]:
        """Return the tool as a ``response.create`` declares it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": {self.argument: {"type": "string"}},
                "required": [self.argument],
                "additionalProperties": False,
            },
        }


class Toolbox:
    """The tools by name."""

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def definitions(self) -> list[dict[str, Any]]:
        """Return all tools as a ``response.create`` declares them."""
        return [tool.definition() for tool in self._tools.values()]

    def call(self, name: str, arguments: str) -> str:
        """Return the output of one call, which is a message where the call fails."""
        try:
            tool = self._tools.get(name)
            if tool is None:
                raise ToolError(f"there is no tool {name!r}; there are: {', '.join(self._tools)}")
            return tool.function(_argument(arguments, tool.argument))
        except ToolError as error:
            return f"error: {error}"


def _argument(arguments: str, name: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ToolError("the arguments are not JSON") from error
    if not isinstance(given, dict) or not isinstance(given.get(name), str):
        raise ToolError(f"expected a string {name!r}")
    return str(given[name])


def toolbox(folder: Path) -> Toolbox:
    """Return the three tools; the one that reads files sees only ``folder``."""
    return Toolbox(
        [
            # One word each: of "calculator", "read_file" and "get_weather" the default model picks
            # the right one in 11 of 24 questions, of these in all (examples being equal).
            Tool("math", "Do arithmetic", "expression", calculate),
            Tool("file", "Read a text file", "path", FileReader(folder)),
            Tool("weather", "Current weather in a city", "city", Weather.bundled()),
        ]
    )


# ---- calculator

_LONGEST_EXPRESSION = 200
_MOST_DIGITS = 100
_LIMIT = 10**_MOST_DIGITS

Number: TypeAlias = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_AS_PYTHON = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression. Nothing is evaluated but numbers and operators.

    Raises:
        ToolError: it is not one, or its value is not a number of at most 100 digits.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"an expression has at most {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.translate(_AS_PYTHON).strip(), mode="eval")
    except (SyntaxError, ValueError) as error:  # ValueError: a null character
        raise ToolError(f"{expression!r} is not an arithmetic expression") from error
    try:
        value = _value(tree.body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise _too_large() from error
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(op, _value(left), _value(right))
        case _:
            raise ToolError("only numbers, parentheses and + - * / // % ** are understood")


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    # A power is judged before it is computed: it might not end in our time.
    if isinstance(op, ast.Pow) and abs(left) > 1 and right * math.log10(abs(left)) > _MOST_DIGITS:
        raise _too_large()
    return _checked(_BINARY[type(op)](left, right))


def _checked(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise ToolError("the value is not a real number")
    if not abs(value) < _LIMIT:  # so written, it catches NaN too
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError(f"the value has more than {_MOST_DIGITS} digits")


# ---- files

_LONGEST_FILE = 2000
_MOST_LISTED = 20


class FileReader:
    """Reads text files of one folder, and of nowhere else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def __call__(self, path: str, /) -> str:
        """Return what the file at ``path`` holds, cut after 2,000 characters.

        Raises:
            ToolError: it lies outside the folder, or it is not a text file.
        """
        try:
            return self._read(path)
        except UnicodeDecodeError as error:
            raise ToolError(f"{path!r} is not a text file") from error
        # ValueError is a null character, RuntimeError a symlink that leads to itself.
        except (OSError, ValueError, RuntimeError) as error:
            raise ToolError(f"{path!r} cannot be read") from error

    def _read(self, path: str) -> str:
        # Where the path leads once every ".." and every symlink is followed.
        file = (self._folder / path).resolve()
        if not file.is_relative_to(self._folder):
            raise ToolError(f"{path!r} lies outside the folder")
        if not file.is_file():
            raise ToolError(f"no file {path!r}; there are: {', '.join(self._listing())}")
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST_FILE + 1).strip()
        return text if len(text) <= _LONGEST_FILE else f"{text[:_LONGEST_FILE]} [cut]"

    def _listing(self) -> list[str]:
        names = sorted(file.name for file in self._folder.iterdir() if file.is_file())
        more = ["..."] if len(names) > _MOST_LISTED else []
        return names[:_MOST_LISTED] + more or ["no files"]


# ---- weather


class Weather:
    """Tells the weather from a table."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._cities = dict(table)

    @classmethod
    def bundled(cls) -> "Weather":
        """Return the weather of the bundled table."""
        return cls(json.loads((DATA / "weather.json").read_text(encoding="utf-8")))

    def __call__(self, city: str, /) -> str:
        """Return one line about ``city``; case and what follows a comma do not matter.

        Raises:
            ToolError: the table lacks it.
        """
        wanted = city.partition(",")[0].strip().casefold()
        for name, weather in self._cities.items():
            if name.casefold() == wanted:
                return f"{name}: {weather}"
        raise ToolError(f"no weather for {city!r}; known are: {', '.join(self._cities)}")
