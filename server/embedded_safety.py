"""The classifier that comes along: abuse by a linear model, secrets by their shape.

The model (alt-profanity-check) was trained on English comments and knows single words. It judges
windows of a few words each, so that what stands around an insult cannot hide it, and the worst
window counts. Secrets are found by those detectors of detect-secrets that go by a fixed shape:
neither entropy nor the word "password" makes one, as hashes, ids and code are ordinary output.

A text can be blocked where a user wrote it or the model says it now. In the rest of a request,
tool outputs above all, abuse is reported and no more: whoever sent it did not write it.

The packages are imported and the model is loaded by the first call, on the thread that makes it.
Time is linear in the length of the texts, whatever they hold. Nothing is sent anywhere: the method
``analyze_line`` of the detectors asks the services that a secret belongs to, and is not used.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from server.safety import PASSED, Direction, Verdict

THRESHOLD = 0.996
"""From which score on a window is abuse. Words that code and logs have as well are below it, each
on its own: "dumb" (a terminal), "kill", "hell", "damn"."""

WINDOW_WORDS = 8
"""How many words are judged together; a window begins at every fourth."""

MAX_CHARACTERS = 2_000_000
"""How much of the texts of one call is read, in all: more than models have context for."""

UNREAD = "unread"
"""The label of a text that was not read, as those of its call are too long."""

_ORDINARY_WORDS = ("ass", "ck", "dick", "fag", "hoe", "hoes", "penis")
"""Words that would be abuse on their own and are not: subtitles, a piece of a Perl escape, German,
Norwegian, Dutch (where "hoe" begins every other question), a garden tool, medicine."""

_BLOCKING = (Direction.INPUT, Direction.OUTPUT)

_WORD = re.compile(r"\w\w+")  # what the model's vectoriser counts as one

# As a JSON string has them, once or several times over: arguments of calls, JSON in tool outputs.
_ESCAPE = re.compile(r"""(?<!\\)\\++(?:u([0-9A-Fa-f]{4})|([bfnrt])|(?=["/]))""")


class EmbeddedClassifier:
    """Finds abuse in all texts, and secrets in what the model says."""

    name = "embedded"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        """Return the verdicts; labels are ``abuse``, ``secret:<type>``, ``unread`` and ``none``."""
        totals = accumulate(len(text) for text in texts)
        read = [
            _unescaped(text)
            for text, total in zip(texts, totals, strict=True)
            if total <= MAX_CHARACTERS
        ]
        blocks = direction in _BLOCKING
        verdicts = [_abuse_verdict(score, blocks) for score in self._model.scores(read)]
        if direction is Direction.OUTPUT:
            verdicts = [
                _secret_verdict(secret) if (secret := self._detector.find(text)) else verdict
                for text, verdict in zip(read, verdicts, strict=True)
            ]
        return verdicts + [Verdict(UNREAD, 0.0, blocks)] * (len(texts) - len(read))

    @cached_property
    def _model(self) -> "AbuseModel":
        return AbuseModel()

    @cached_property
    def _detector(self) -> "SecretDetector":
        return SecretDetector()


def _abuse_verdict(score: float, blocks: bool) -> Verdict:
    if score < THRESHOLD:
        return Verdict(PASSED.label, score)
    return Verdict("abuse", score, blocks)


def _secret_verdict(secret_type: str) -> Verdict:
    return Verdict(f"secret:{secret_type}", 1.0, blocks=True)


def _unescaped(text: str) -> str:
    """Resolve what would glue a word to the one before it, or tear a URL apart."""
    return _ESCAPE.sub(_resolved, text) if "\\" in text else text


def _resolved(escape: re.Match[str]) -> str:
    code, letter = escape.groups()
    if code:
        return chr(int(code, 16))
    return "\n" if letter else ""


# --- Abuse ---------------------------------------------------------------------------------------


class AbuseModel:
    """The model of alt-profanity-check: the mean of some support vector machines over words.

    Its own ``predict_prob`` asks the machines one by one, with checks that take far longer than the
    arithmetic. The scores here are the same, but for the ordinary words.
    """

    def __init__(self) -> None:
        from profanity_check.profanity_check import model, vectorizer

        machines = model.calibrated_classifiers_
        calibrators = [machine.calibrators[0] for machine in machines]
        self._words = vectorizer.build_analyzer()
        self._vocabulary: dict[str, int] = vectorizer.vocabulary_
        self._idf: NDArray[np.float64] = vectorizer.idf_  # (words,)
        self._weights = np.concatenate([m.estimator.coef_ for m in machines])  # (machines, words)
        self._weights[:, [self._vocabulary[word] for word in _ORDINARY_WORDS]] = 0
        self._intercepts = np.concatenate([m.estimator.intercept_ for m in machines])
        self._slopes = np.array([calibrator.a_ for calibrator in calibrators])
        self._offsets = np.array([calibrator.b_ for calibrator in calibrators])

    def scores(self, texts: Iterable[str]) -> list[float]:
        """Return how abusive the worst window of each text is, from 0 to 1."""
        windows = [_windows(text) for text in texts]
        scores = iter(self.window_scores([w for its_windows in windows for w in its_windows]))
        return [
            max((float(next(scores)) for _ in its_windows), default=0.0) for its_windows in windows
        ]

    def window_scores(self, windows: Sequence[str]) -> NDArray[np.float64]:
        """Return the score of each window, taken as a whole."""
        if not windows:
            return np.empty(0)
        tfidf, columns, rows = self._tfidf(windows)
        distances = [np.bincount(rows, tfidf * row[columns], len(windows)) for row in self._weights]
        distances_by_window = np.stack(distances, axis=1) + self._intercepts
        probabilities = 1 / (1 + np.exp(self._slopes * distances_by_window + self._offsets))
        scores: NDArray[np.float64] = probabilities.mean(axis=1)
        return scores

    def _tfidf(
        self, windows: Sequence[str]
    ) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
        """Return what the vectorizer makes of ``windows``, sparse: values, of length 1 a window,
        with the index of the word and that of the window."""
        counts = [Counter(map(self._vocabulary.get, self._words(window))) for window in windows]
        found = [
            (row, column, number)
            for row, count in enumerate(counts)
            for column, number in count.items()
            if column is not None
        ]
        rows, columns, numbers = np.array(found, dtype=np.intp).reshape(-1, 3).T
        tfidf = numbers * self._idf[columns]
        lengths = np.sqrt(np.bincount(rows, tfidf**2, len(windows)))
        return tfidf / lengths[rows], columns, rows


def _windows(text: str) -> list[str]:
    """Cut ``text`` into windows that overlap by half."""
    words = [match.span() for match in _WORD.finditer(text)]
    half = WINDOW_WORDS // 2
    return [
        text[words[i][0] : words[min(i + WINDOW_WORDS, len(words)) - 1][1]]
        for i in range(0, max(len(words) - half, min(len(words), 1)), half)
    ]


# --- Secrets -------------------------------------------------------------------------------------

_PIECE_CHARACTERS = 4096
"""How much is given to a detector at once: some take quadratic time. A piece begins at every half
of it, so a secret of up to that half is within one."""

# A header, some lines of what kind of key it is, and a line that begins with base64.
_KEY_WITH_BODY = re.compile(
    r"(?:PRIVATE KEY|User-Key-File)[^\n]{0,60}(?:\n[^\n]{0,80}){0,4}?"
    r"(?:-----|\n)[ \t]*[A-Za-z0-9+/]{40}"
)


class SecretDetector:
    """Those detectors of detect-secrets that seldom err.

    Left out are the ones that go by entropy or by keywords, and those whose shape other things
    have: a Telegram token is like a time with a hash, a part of Artifactory's like a word.
    """

    def __init__(self) -> None:
        from detect_secrets.plugins.aws import AWSKeyDetector
        from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
        from detect_secrets.plugins.basic_auth import BasicAuthDetector
        from detect_secrets.plugins.discord import DiscordBotTokenDetector
        from detect_secrets.plugins.github_token import GitHubTokenDetector
        from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
        from detect_secrets.plugins.jwt import JwtTokenDetector
        from detect_secrets.plugins.mailchimp import MailchimpDetector
        from detect_secrets.plugins.npm import NpmDetector
        from detect_secrets.plugins.openai import OpenAIDetector
        from detect_secrets.plugins.private_key import PrivateKeyDetector
        from detect_secrets.plugins.pypi_token import PypiTokenDetector
        from detect_secrets.plugins.sendgrid import SendGridDetector
        from detect_secrets.plugins.slack import SlackDetector
        from detect_secrets.plugins.square_oauth import SquareOAuthDetector
        from detect_secrets.plugins.stripe import StripeDetector

        self._detectors = (
            AWSKeyDetector(),
            AzureStorageKeyDetector(),
            DiscordBotTokenDetector(),
            GitHubTokenDetector(),
            GitLabTokenDetector(),
            JwtTokenDetector(),
            MailchimpDetector(),
            NpmDetector(),
            OpenAIDetector(),
            PypiTokenDetector(),
            SendGridDetector(),
            SlackDetector(),
            SquareOAuthDetector(),
            StripeDetector(),
        )
        self._private_keys = PrivateKeyDetector()
        self._passwords = BasicAuthDetector()

    def find(self, text: str) -> str | None:
        """Return the type of the first secret that is found, or None."""
        return next((found for piece in _pieces(text) for found in self._types_in(piece)), None)

    def _types_in(self, piece: str) -> Iterator[str]:
        for detector in self._detectors:
            if any(not _is_example(secret) for secret in detector.analyze_string(piece)):
                yield detector.secret_type
        if any(map(_is_password, self._passwords.analyze_string(piece))):
            yield self._passwords.secret_type
        # Its header alone is no key: code that reads keys has it.
        if any(self._private_keys.analyze_string(piece)) and _KEY_WITH_BODY.search(piece):
            yield self._private_keys.secret_type


def _pieces(text: str) -> Iterator[str]:
    half = _PIECE_CHARACTERS // 2
    for start in range(0, max(len(text) - half, 1), half):
        yield text[start : start + _PIECE_CHARACTERS]


def _is_example(secret: str) -> bool:
    """Say whether it is one of those that documentation prints, as AWS marks them."""
    return "EXAMPLE" in secret


def _is_password(password: str) -> bool:
    """Say whether it looks drawn, and not like ``user:password`` or ``<password>`` in a manual."""
    return (
        len(password) >= 8
        and any(map(str.isdigit, password))
        and any(map(str.isalpha, password))
        and "<" not in password
        and "{" not in password
    )
