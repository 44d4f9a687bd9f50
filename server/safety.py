"""Safety classification: what a request brings and what a model answers, judged by a classifier.

Which classifier that is, the operator chooses; the one that comes along is in ``embedded_safety``
and is imported only when it is asked for. It is called on a thread of its own, so the event loop
does not wait for it. Nothing passes because a classifier failed: that is an error of the server.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

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
    """Judges texts. It is called on one thread, by one caller at a time."""

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
    """Classifies off the event loop, on a thread of its own.

    Without a classifier it does no work, and everything passes.
    """

    def __init__(self, classifier: Classifier | None) -> None:
        self._classifier = classifier
        self._thread = WorkerThread("safety")  # begins with the first work

    @property
    def is_on(self) -> bool:
        """Whether there is a classifier."""
        return self._classifier is not None

    @property
    def name(self) -> str:
        """What reports call the classifier."""
        return "off" if self._classifier is None else self._classifier.name

    async def warm_up(self) -> None:
        """Classify an empty text, so that no request waits for what is loaded on first use.

        Raises:
            ClassificationError: the classifier failed.
        """
        await self.classify_output("")

    async def classify_input(self, items: Sequence[InputItem]) -> Findings:
        """Classify all items that have text; those without are passed over.

        Raises:
            ClassificationError: the classifier failed.
        """
        if self._classifier is None:
            return Findings()
        read = [
            (i, direction_of(item), text) for i, item in enumerate(items) if (text := text_of(item))
        ]
        if not read:
            return Findings()
        texts = [(direction, text) for _, direction, text in read]
        verdicts = await self._thread.run(_classify_each, self._classifier, texts)
        return Findings(tuple((i, v) for (i, _, _), v in zip(read, verdicts, strict=True)))

    async def classify_output(self, text: str) -> Verdict:
        """Classify what the model says: a message, a thought, or the arguments of a call.

        Raises:
            ClassificationError: the classifier failed.
        """
        if self._classifier is None:
            return PASSED
        [verdict] = await self._thread.run(_classify, self._classifier, [text], Direction.OUTPUT)
        return verdict

    def close(self) -> None:
        """Wait for the classification in progress, and end the thread."""
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


# --- What follows is done on the thread ----------------------------------------------------------


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
    if spec == "off":
        return None
    return _make(_EMBEDDED if spec == "embedded" else spec)


def _make(spec: str) -> Classifier:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise SafetyError(f"expected 'off', 'embedded' or 'module:Class', got {spec!r}")
    try:
        make = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise SafetyError(f"cannot import the classifier {spec}: {error}") from error
    if not callable(make):
        raise SafetyError(f"expected {spec} to be a class, got {type(make).__name__}")
    try:
        classifier = make()
    except Exception as error:
        raise SafetyError(f"cannot make the classifier {spec}: {error}") from error
    return _checked(classifier, spec)


def _checked(classifier: Any, spec: str) -> Classifier:
    if not callable(getattr(classifier, "classify", None)):
        raise SafetyError(f"expected {spec} to have a method 'classify'")
    if not isinstance(getattr(classifier, "name", None), str):
        raise SafetyError(f"expected {spec} to have a string 'name'")
    checked: Classifier = classifier
    return checked
