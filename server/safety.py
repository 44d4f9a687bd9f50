"""Safety classification: what a request brings and what a model answers, judged by a classifier.

Which classifier that is, the operator chooses; the one that comes along is in ``embedded_safety``
and is imported only when it is asked for. It is called on threads of its own, so the event loop
does not wait for it. Nothing passes because a classifier failed: that is an error of the server.

There are two of it, each with its thread: one reads what comes in, the other what a model says.
What comes in may be as long as a context, and responses that are being sampled do not wait for it.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, cast

from protocol.items import (
    AdditionalTools,
    CallOutput,
    Compaction,
    CustomToolCall,
    FunctionCall,
    InputItem,
    ItemReference,
    Message,
    ReasoningItem,
    UnknownItem,
)
from sampler.worker_thread import WorkerThread

_EMBEDDED = "server.embedded_safety:EmbeddedClassifier"


class SafetyError(ValueError):
    """A classifier that cannot be loaded; the message is for the operator."""


class ClassificationError(Exception):
    """A classifier failed, so it is not known whether a text may pass. Quotes no text."""


class Direction(StrEnum):
    """Where a text comes from, and so who may be held to it."""

    INPUT = "input"
    """What a user said."""
    CONTEXT = "context"
    """Instructions, and what a model said earlier, as the client sends it back."""
    TOOL_OUTPUT = "tool_output"
    """What a tool answered: data that neither the user nor the model wrote."""
    OUTPUT = "output"
    """What the model says now."""


@dataclass(frozen=True)
class Verdict:
    """What a classifier says of one text."""

    label: str = "none"
    """The category, for example ``abuse``. Never a part of the text."""
    score: float = 0.0
    """How sure the classifier is, from 0 to 1."""
    blocks: bool = False
    """Whether the text must not pass; otherwise the label is only reported."""


PASSED = Verdict()
"""Of a text with which nothing is wrong."""


class Classifier(Protocol):
    """Judges texts. Each instance is called on one thread, by one caller at a time."""

    name: str
    """By which reports call it."""

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        """Return a verdict for each of ``texts``, in their order."""
        ...


@dataclass(frozen=True)
class Findings:
    """The verdicts of the items that were classified, each with the index of its item."""

    verdicts: tuple[tuple[int, Verdict], ...] = ()

    @property
    def num_items(self) -> int:
        """How many items were classified."""
        return len(self.verdicts)

    @property
    def blocked(self) -> tuple[int, Verdict] | None:
        """The first verdict that blocks, with the index of its item, or None if all may pass."""
        return next((found for found in self.verdicts if found[1].blocks), None)


class Safety:
    """Classifies off the event loop: input on one thread, and output on another.

    Without a classifier it does no work, and everything passes.

    Args:
        load: makes a classifier, one for each thread; None where there is to be none.
    """

    def __init__(self, load: Callable[[], Classifier | None]) -> None:
        self._input = _Reader(load(), "safety-input")
        self._output = _Reader(load(), "safety-output")

    @property
    def is_on(self) -> bool:
        """Whether there is a classifier."""
        return self._output.classifier is not None

    @property
    def name(self) -> str:
        """What reports call the classifier."""
        return "off" if self._output.classifier is None else self._output.classifier.name

    async def warm_up(self) -> None:
        """Classify empty texts, so that no request waits for what is loaded on first use.

        Raises:
            ClassificationError: the classifier failed.
        """
        await self._input.read([(Direction.INPUT, "")])
        await self._output.read([(Direction.OUTPUT, "")])

    async def classify_input(self, items: Sequence[InputItem]) -> Findings:
        """Classify all items that have text; those without are passed over.

        Raises:
            ClassificationError: the classifier failed.
        """
        if not self.is_on:
            return Findings()
        read = [
            (i, direction_of(item), text) for i, item in enumerate(items) if (text := text_of(item))
        ]
        verdicts = await self._input.read([(direction, text) for _, direction, text in read])
        return Findings(tuple((i, v) for (i, _, _), v in zip(read, verdicts, strict=True)))

    async def classify_output(self, text: str) -> Verdict:
        """Classify what the model says: a message, a thought, or the arguments of a call.

        Raises:
            ClassificationError: the classifier failed.
        """
        [verdict] = await self._output.read([(Direction.OUTPUT, text)])
        return verdict

    def close(self) -> None:
        """Wait for the classifications in progress, and end the threads."""
        self._input.close()
        self._output.close()


class _Reader:
    """A classifier, and the one thread that calls it. Without a classifier everything passes."""

    def __init__(self, classifier: Classifier | None, thread_name: str) -> None:
        self.classifier = classifier
        self._thread = WorkerThread(thread_name)  # begins with the first work

    async def read(self, texts: Sequence[tuple[Direction, str]]) -> Sequence[Verdict]:
        """Return the verdicts in the order of ``texts``.

        Raises:
            ClassificationError: the classifier failed.
        """
        if self.classifier is None or not texts:
            return [PASSED] * len(texts)
        return await self._thread.run(_classify_each, self.classifier, texts)

    def close(self) -> None:
        self._thread.close()


# --- What is classified --------------------------------------------------------------------------


def text_of(item: InputItem) -> str | None:
    """Return what is classified of an item, or None if it has no text."""
    match item:
        case Message(text=text) | ReasoningItem(text=text) | Compaction(summary=text):
            return text
        case FunctionCall(arguments=text) | CustomToolCall(input=text) | CallOutput(output=text):
            return text
        case ItemReference() | AdditionalTools() | UnknownItem():
            return None


def direction_of(item: InputItem) -> Direction:
    """Return where the text of an item comes from."""
    match item:
        case Message(role="user"):
            return Direction.INPUT
        case CallOutput():
            return Direction.TOOL_OUTPUT
        case _:
            return Direction.CONTEXT


# --- What follows is done on a thread ------------------------------------------------------------


def _classify_each(classifier: Classifier, texts: Sequence[tuple[Direction, str]]) -> list[Verdict]:
    """Classify all texts of a direction at once; the verdicts are in the order of ``texts``."""
    verdicts = [PASSED] * len(texts)
    for direction in Direction:
        places = [i for i, (its_direction, _) in enumerate(texts) if its_direction is direction]
        if places:
            found = _classify(classifier, [texts[i][1] for i in places], direction)
            for i, verdict in zip(places, found, strict=True):
                verdicts[i] = verdict
    return verdicts


def _classify(
    classifier: Classifier, texts: Sequence[str], direction: Direction
) -> Sequence[Verdict]:
    try:
        verdicts = list(classifier.classify(texts, direction))
    except Exception as error:
        what = type(error).__name__  # its message may quote a text
        raise ClassificationError(f"the classifier {classifier.name} raised {what}") from error
    if len(verdicts) != len(texts) or not all(isinstance(v, Verdict) for v in verdicts):
        raise ClassificationError(
            f"expected {len(texts)} verdicts of the classifier {classifier.name}, "
            f"got {len(verdicts)} objects, of {sorted({type(v).__name__ for v in verdicts})}"
        )
    return verdicts


# --- Loading -------------------------------------------------------------------------------------


def load_classifier(spec: str) -> Classifier | None:
    """Return the classifier that ``spec`` names.

    Args:
        spec: ``off``, which is None; ``embedded``; or ``module:Class``, which is imported and
            called without arguments.

    Raises:
        SafetyError: there is no such classifier, or it cannot be made.
    """
    if (make := find_classifier(spec)) is None:
        return None
    try:
        classifier = make()
    except Exception as error:
        raise SafetyError(f"cannot make the classifier {spec}: {error}") from error
    return _checked(classifier, spec)


def find_classifier(spec: str) -> Callable[[], Any] | None:
    """Return what makes the classifier that ``spec`` names; see ``load_classifier``.

    Raises:
        SafetyError: there is no such classifier.
    """
    if spec == "off":
        return None
    module, _, name = (_EMBEDDED if spec == "embedded" else spec).partition(":")
    if not module or not name:
        raise SafetyError(f"expected 'off', 'embedded' or 'module:Class', got {spec!r}")
    try:
        make = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise SafetyError(
            f"cannot import the classifier {spec}: {error} (set PYTHONPATH to its directory: the "
            "current one is not looked in)"
        ) from error
    except Exception as error:
        raise SafetyError(f"cannot import the classifier {spec}: {error}") from error
    if not callable(make):
        raise SafetyError(f"expected {spec} to be a class, got {type(make).__name__}")
    return cast(Callable[[], Any], make)


def _checked(classifier: Any, spec: str) -> Classifier:
    if not callable(getattr(classifier, "classify", None)):
        raise SafetyError(f"expected {spec} to have a method 'classify'")
    if not isinstance(getattr(classifier, "name", None), str):
        raise SafetyError(f"expected {spec} to have a string 'name'")
    checked: Classifier = classifier
    return checked
