import asyncio
import base64
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from profanity_check import predict_prob

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
from server.embedded_safety import (
    MAX_CHARACTERS,
    THRESHOLD,
    UNREAD,
    AbuseModel,
    EmbeddedClassifier,
)
from server.safety import (
    PASSED,
    ClassificationError,
    Classifier,
    Direction,
    Findings,
    Safety,
    SafetyError,
    Verdict,
    load_classifier,
    text_of,
)
from tests.server.running import DEADLINE_SECONDS

HISTORY: list[InputItem] = [
    Message("system", "Answer in one word."),
    Message("user", "Is it warm in Oslo?"),
    ReasoningItem("They want the weather."),
    FunctionCall("call_1", "weather", '{"city": "Oslo"}'),
    CallOutput("call_1", "7 °C"),
    CustomToolCall("call_2", "shell", "ls -l"),
    CallOutput("call_2", "total 0"),
    Message("assistant", "No."),
    Compaction("They asked for the weather."),
]
"""Of each kind that has text, one item at least."""

WITHOUT_TEXT: list[InputItem] = [
    ItemReference("msg_1", "input[0]"),
    AdditionalTools(()),
    UnknownItem("web_search_call"),
    Message("user", ""),
]


# --- Classifiers ---------------------------------------------------------------------------------


class WordClassifier:
    """Blocks what holds the word "forbidden", and keeps what it was called with."""

    name = "word"

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], Direction]] = []
        self.thread_names: list[str] = []

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        self.calls.append((list(texts), direction))
        self.thread_names.append(threading.current_thread().name)
        return [Verdict("word", 1.0, blocks="forbidden" in text) for text in texts]


class RaisingClassifier:
    name = "raising"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        raise RuntimeError(f"cannot judge {texts}")


class OneShortClassifier:
    name = "one short"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        return [PASSED] * (len(texts) - 1)


class OneTooManyClassifier:
    name = "one too many"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        return [PASSED] * (len(texts) + 1)


class LabelClassifier:
    """Returns what is no verdict, as an operator's class may in spite of its types."""

    name = "label"

    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        return ["fine"] * len(texts)  # type: ignore[list-item]


class NeedsArguments:
    name = "needs arguments"

    def __init__(self, path: str) -> None:
        self.path = path


class WithoutName:
    def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
        return [PASSED for _ in texts]


class WithoutMethod:
    name = "without method"


@pytest.fixture
def word() -> WordClassifier:
    return WordClassifier()


@pytest.fixture
def safety(word: WordClassifier) -> Iterator[Safety]:
    with closing(Safety(lambda: word)) as safety:
        yield safety


@pytest.fixture(scope="module")
def embedded() -> EmbeddedClassifier:
    return EmbeddedClassifier()


def verdict_of(
    classifier: Classifier, text: str, direction: Direction = Direction.OUTPUT
) -> Verdict:
    [verdict] = classifier.classify([text], direction)
    return verdict


# --- What is classified --------------------------------------------------------------------------


@pytest.mark.parametrize("item", HISTORY, ids=lambda item: type(item).__name__)
def test_what_a_conversation_says_is_read(item: InputItem) -> None:
    assert text_of(item)


@pytest.mark.parametrize("item", WITHOUT_TEXT[:3], ids=lambda item: type(item).__name__)
def test_an_item_that_says_nothing_has_no_text(item: InputItem) -> None:
    assert text_of(item) is None


async def test_each_item_with_text_has_a_verdict_at_its_index(safety: Safety) -> None:
    items = [*WITHOUT_TEXT, *HISTORY]

    findings = await safety.classify_input(items)

    assert [index for index, _ in findings.verdicts] == list(range(len(WITHOUT_TEXT), len(items)))
    assert findings.num_items == len(HISTORY)
    assert findings.blocked is None


async def test_texts_are_classified_at_once_for_each_direction(
    safety: Safety, word: WordClassifier
) -> None:
    await safety.classify_input(HISTORY)

    assert word.calls == [
        (["Is it warm in Oslo?"], Direction.INPUT),
        (
            [
                "Answer in one word.",
                "They want the weather.",
                '{"city": "Oslo"}',
                "ls -l",
                "No.",
                "They asked for the weather.",
            ],
            Direction.CONTEXT,
        ),
        (["7 °C", "total 0"], Direction.TOOL_OUTPUT),
    ]


async def test_the_first_item_that_is_blocked_is_named(safety: Safety) -> None:
    items: list[InputItem] = [
        Message("user", "fine"),
        CallOutput("call_1", "forbidden"),
        Message("user", "forbidden"),
    ]

    findings = await safety.classify_input(items)

    assert findings.blocked == (1, Verdict("word", 1.0, blocks=True))
    assert [verdict.blocks for _, verdict in findings.verdicts] == [False, True, True]


async def test_what_the_model_says_is_classified_as_output(
    safety: Safety, word: WordClassifier
) -> None:
    verdict = await safety.classify_output("forbidden")

    assert verdict.blocks
    assert word.calls == [(["forbidden"], Direction.OUTPUT)]


async def test_each_way_has_a_classifier_and_a_thread_that_is_not_the_event_loops() -> None:
    made: list[WordClassifier] = []

    def make() -> WordClassifier:
        made.append(WordClassifier())
        return made[-1]

    with closing(Safety(make)) as safety:
        await asyncio.gather(*(safety.classify_output(str(i)) for i in range(5)))
        await asyncio.gather(*(safety.classify_input(HISTORY) for _ in range(5)))

    directions = [{direction for _, direction in classifier.calls} for classifier in made]
    threads = [set(classifier.thread_names) for classifier in made]
    assert directions == [set(Direction) - {Direction.OUTPUT}, {Direction.OUTPUT}]
    assert list(map(len, threads)) == [1, 1]
    assert threads[0].isdisjoint(threads[1])
    assert threading.current_thread().name not in threads[0] | threads[1]


async def test_what_the_model_says_does_not_wait_for_what_comes_in() -> None:
    released = threading.Event()

    class SlowReader(WordClassifier):
        def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
            if direction is not Direction.OUTPUT:
                assert released.wait(DEADLINE_SECONDS), "nobody released the classifier"
            return super().classify(texts, direction)

    with closing(Safety(SlowReader)) as safety:
        reading = asyncio.ensure_future(safety.classify_input(HISTORY))
        verdict = await safety.classify_output("forbidden")
        was_released = released.is_set()
        released.set()
        findings = await reading

    assert not was_released
    assert verdict.blocks
    assert findings.num_items == len(HISTORY)


async def test_both_are_warmed_up() -> None:
    made: list[WordClassifier] = []

    def make() -> WordClassifier:
        made.append(WordClassifier())
        return made[-1]

    with closing(Safety(make)) as safety:
        await safety.warm_up()

    assert [classifier.calls for classifier in made] == [
        [([""], Direction.INPUT)],
        [([""], Direction.OUTPUT)],
    ]


async def test_a_request_without_text_does_not_bother_the_classifier(
    safety: Safety, word: WordClassifier
) -> None:
    assert await safety.classify_input(WITHOUT_TEXT) == Findings()
    assert word.calls == []


async def test_without_a_classifier_everything_passes() -> None:
    with closing(Safety(lambda: None)) as safety:
        await safety.warm_up()
        findings = await safety.classify_input([Message("user", "forbidden")])
        verdict = await safety.classify_output("forbidden")

    assert not safety.is_on
    assert safety.name == "off"
    assert findings == Findings()
    assert verdict == PASSED


# --- Failing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "classifier",
    [RaisingClassifier(), OneShortClassifier(), OneTooManyClassifier(), LabelClassifier()],
    ids=lambda classifier: classifier.name,
)
async def test_nothing_passes_where_the_classifier_fails(classifier: Classifier) -> None:
    with closing(Safety(lambda: classifier)) as safety:
        with pytest.raises(ClassificationError, match=classifier.name) as output_error:
            await safety.classify_output("a confidential text")
        with pytest.raises(ClassificationError) as input_error:
            await safety.classify_input([Message("user", "a confidential text")])

    assert "confidential" not in str(output_error.value)
    assert "confidential" not in str(input_error.value)


async def test_the_thread_outlives_a_failure() -> None:
    class OnceRaising(WordClassifier):
        def classify(self, texts: Sequence[str], direction: Direction) -> Sequence[Verdict]:
            if "broken" in texts:
                raise ValueError
            return super().classify(texts, direction)

    with closing(Safety(OnceRaising)) as safety:
        with pytest.raises(ClassificationError, match="ValueError"):
            await safety.classify_output("broken")

        assert (await safety.classify_output("forbidden")).blocks


# --- Loading -------------------------------------------------------------------------------------


def test_off_is_no_classifier() -> None:
    assert load_classifier("off") is None


def test_the_embedded_classifier_is_loaded_by_its_name() -> None:
    classifier = load_classifier("embedded")

    assert classifier is not None
    assert classifier.name == "embedded"


def test_a_class_is_loaded_by_its_module_and_name() -> None:
    classifier = load_classifier(f"{__name__}:WordClassifier")

    assert classifier is not None
    assert classifier.name == "word"
    assert verdict_of(classifier, "forbidden").blocks


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected 'off', 'embedded' or 'module:Class', got ''"),
        ("on", "expected 'off', 'embedded' or 'module:Class', got 'on'"),
        (":Class", "expected 'off'"),
        ("module:", "expected 'off'"),
        ("there.is.none:Such", "cannot import the classifier there.is.none:Such: No module"),
        (f"{__name__}:NoSuchClass", "cannot import .* no attribute 'NoSuchClass'"),
        (f"{__name__}:HISTORY", "to be a class, got list"),
        (f"{__name__}:NeedsArguments", "cannot make .* 'path'"),
        (f"{__name__}:WithoutMethod", "to have a method 'classify'"),
        (f"{__name__}:WithoutName", "to have a string 'name'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(spec: str, message: str) -> None:
    with pytest.raises(SafetyError, match=message):
        load_classifier(spec)


# --- The embedded classifier: abuse --------------------------------------------------------------

ABUSE = [
    "You are an idiot.",
    "you idiot",
    "Shut up, you moron!",
    "You stupid, useless piece of crap.",
    "Are you stupid? Answer my question, idiot.",
    "You pathetic loser, I hate you.",
    "what a bastard you are",
]

ORDINARY = [
    "Is it warm in Oslo?",
    "Damn, the build failed again. Can you have a look?",
    "kill -9 the child process",
    "How do I kill a zombie process whose parent is dead?",
    "The master died and the slave was promoted; abort, execute, dump core.",
    "export TERM=dumb && git push --force",
    "def is_dumb(term: str) -> bool:\n    return os.environ['TERM'] == 'dumb'",
    'void *p = malloc(n); if (!p) die("out of memory"); /* hell of a hack */',
    "ffmpeg -i in.mkv -vf ass=subs.ass out.mp4",
    'Traceback (most recent call last):\n  File "app.py", line 7, in <module>\n    run()\n'
    "ZeroDivisionError: division by zero",
    "2026-10-02T07:12:09Z FATAL worker[4242]: killed by signal 9 (oom-killer), 3 children died",
    '{"temperature": 7, "unit": "°C", "sources": ["yr.no", "met.no"], "ok": true}',
    "diff --git a/x.py b/x.py\n-    raise RuntimeError\n+    raise ValueError('bad input')",
    "SELECT name, sex, race FROM patients WHERE diagnosis LIKE '%breast cancer%';",
    "Sussex, Essex, Middlesex and Scunthorpe are places in England.",
    "Results: 1. Moby Dick, or The Whale. 2. The black sheep. 3. How to shoot in raw format.",
    "A gay couple in Berlin wants to adopt a child. Which forms do they need?",
    "The user wants to escape their input; inject, strip and blow up the buffer.",
    "penetration testing report: the attacker could execute code as root",
    "Hoe gaat het met de test? Er is een fout.",
    "Das Brett ist dick, die Nägel sind kurz.",
    's/\\x00/\\\\0/g; $esc{\'v\'} = "\\cK"; print "\\n\\t$_\\n" for @list;',
    "C:\\new\\temp\\bin\\first\\users",
    "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUQ2l0eSBvZiBOb3J3YXkgb3Nsb3BhcmthMAoGCCqG",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b\nAuthor: A U Thor <author@example.com>",
    "id: 550e8400-e29b-41d4-a716-446655440000, etag: d41d8cd98f00b204e9800998ecf8427e",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "1759388400:da39a3ee5e6b4b0d3255bfef95601890afd80709 backup.tar",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9Q",
    "DATABASE_URL=postgres://user:password@localhost:5432/app",
    "pip install --index-url https://user:<password>@pypi.example.com/simple",
    "curl -H 'Authorization: Bearer $TOKEN' https://api.example.com/v1/items?key=API_KEY",
    'if b"BEGIN RSA PRIVATE KEY" in data:\n    raise ValueError("that is a private key")',
    "aws_access_key_id = AKIAIOSFODNN7EXAMPLE",
    "password = os.environ['PASSWORD']  # the secret token is never logged",
]


@pytest.mark.parametrize("text", ABUSE)
@pytest.mark.parametrize("direction", [Direction.INPUT, Direction.OUTPUT])
def test_abuse_of_the_user_and_of_the_model_is_blocked(
    embedded: EmbeddedClassifier, text: str, direction: Direction
) -> None:
    verdict = verdict_of(embedded, text, direction)

    assert verdict.label == "abuse"
    assert verdict.blocks
    assert THRESHOLD <= verdict.score <= 1


@pytest.mark.parametrize("text", ABUSE)
@pytest.mark.parametrize("direction", [Direction.CONTEXT, Direction.TOOL_OUTPUT])
def test_abuse_that_neither_of_them_wrote_is_only_reported(
    embedded: EmbeddedClassifier, text: str, direction: Direction
) -> None:
    verdict = verdict_of(embedded, text, direction)

    assert verdict.label == "abuse"
    assert not verdict.blocks


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_content_passes(embedded: EmbeddedClassifier, text: str) -> None:
    for direction in Direction:
        verdict = verdict_of(embedded, text, direction)

        assert verdict.label == "none"
        assert not verdict.blocks
        assert 0 <= verdict.score < THRESHOLD


def test_all_ordinary_content_in_one_text_passes(embedded: EmbeddedClassifier) -> None:
    assert not verdict_of(embedded, "\n".join(ORDINARY)).blocks


@pytest.mark.parametrize("num_words", [0, 1, 3, 4, 5, 1000, 20_000])
def test_abuse_cannot_hide_in_a_long_text(embedded: EmbeddedClassifier, num_words: int) -> None:
    words = ["the", "temperature", "in", "oslo", "today", "is"]
    before = " ".join(words[i % len(words)] for i in range(num_words))
    after = " ".join(words[i % len(words)] for i in range(20_000 - num_words))

    verdict = verdict_of(embedded, f"{before} you stupid idiot {after}", Direction.INPUT)

    assert verdict.blocks


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"text": "Hello,\nidiot\tyou stupid moron"}),
        json.dumps(json.dumps({"text": "Hello,\nidiot\nstupid"})),
        r'{"text": "you \u0069diot"}',
    ],
)
def test_abuse_cannot_hide_behind_escapes(embedded: EmbeddedClassifier, text: str) -> None:
    assert verdict_of(embedded, text).blocks


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "7", "\\", "\\\\u", "\\ud83d", "\x00", "🌧", "\ud83d", "温度は七度です"]
)
def test_odd_texts_pass(embedded: EmbeddedClassifier, text: str) -> None:
    assert not verdict_of(embedded, text).blocks


def test_a_batch_has_the_verdicts_of_its_texts_alone(embedded: EmbeddedClassifier) -> None:
    texts = [*ORDINARY, *ABUSE, "", *(f"{a} {b}" for a, b in zip(ABUSE, ORDINARY, strict=False))]

    together = embedded.classify(texts, Direction.OUTPUT)

    alone = [verdict_of(embedded, text) for text in texts]
    assert [(v.label, v.blocks) for v in together] == [(v.label, v.blocks) for v in alone]
    assert [v.score for v in together] == pytest.approx([v.score for v in alone])


def test_an_empty_batch_has_no_verdicts(embedded: EmbeddedClassifier) -> None:
    assert list(embedded.classify([], Direction.INPUT)) == []


def test_scores_are_those_of_the_package() -> None:
    texts = [*ABUSE, *ORDINARY[:8]]  # the ordinary words come later

    scores = AbuseModel().window_scores(texts)

    assert scores == pytest.approx(predict_prob(texts))


def test_what_is_too_long_to_be_read_passes_only_where_nothing_is_blocked(
    embedded: EmbeddedClassifier,
) -> None:
    texts = ["fine", "7" * MAX_CHARACTERS, "fine"]

    blocking = embedded.classify(texts, Direction.INPUT)
    reporting = embedded.classify(texts, Direction.TOOL_OUTPUT)

    assert [(v.label, v.blocks) for v in blocking] == [
        ("none", False),
        (UNREAD, True),
        (UNREAD, True),
    ]
    assert [v.label for v in reporting] == ["none", UNREAD, UNREAD]
    assert not any(v.blocks for v in reporting)


# --- The embedded classifier: secrets ------------------------------------------------------------


def _jwt() -> str:
    parts = [b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"N N"}', b"x" * 32]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


# Put together here, so that nobody's scanner takes this file for a leak.
SECRETS = {
    "AWS Access Key": "AKIA" + "Q3EGRIO7XZ2LMN4P",
    "Azure Storage Account access key": "AccountKey=" + "x9" * 43 + "==",
    "Basic Auth Credentials": "postgres://app:" + "hx7Qm2pLw9" + "@db.internal:5432/app",
    "Discord Bot Token": "M" + "Tk" * 12 + ".Yx0aBc." + "k3Lm9" * 5 + "ab",
    "GitHub Token": "ghp_" + "a1B2c3" * 6,
    "GitLab Token": "glpat-" + "a1B2c3D4e5" * 2,
    "JSON Web Token": _jwt(),
    "Mailchimp Access Key": "0f" * 16 + "-us12",
    "NPM tokens": "//registry.npmjs.org/:_authToken=" + "npm_" + "a1B2c3" * 6,
    "OpenAI Token": "sk-proj-" + "a1B2c3D4e5" * 2 + "T3Blbk" + "FJ" + "a1B2c3D4e5" * 2,
    "Private Key": "-----BEGIN " + "PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEF" * 3,
    "PyPI Token": "pypi-AgEIcHlwaS5v" + "cmc" + "a1B2c3D4e5" * 8,
    "SendGrid API Key": "SG." + "a1" * 11 + "." + "b2" * 21 + "c",
    "Slack Token": "xoxb-" + "123456789012-123456789012-" + "a1B2c3D4e5F6",
    "Square OAuth Secret": "sq0csp-" + "a1" * 21 + "b",
    "Stripe Access Key": "sk_" + "live_" + "a1B2c3D4e5F6" * 2,
}


@pytest.mark.parametrize("secret_type", SECRETS)
def test_a_secret_in_what_the_model_says_is_blocked(
    embedded: EmbeddedClassifier, secret_type: str
) -> None:
    text = f"Here is what I found:\n\n    {SECRETS[secret_type]}\n\nAnything else?"

    verdict = verdict_of(embedded, text)

    assert verdict == Verdict(f"secret:{secret_type}", 1.0, blocks=True)


@pytest.mark.parametrize(
    "key",
    [
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0F\n\nBODY",
        "    -----BEGIN OPENSSH PRIVATE KEY-----\n    BODY\n    -----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2\n\nBODY",
        "-----BEGIN PRIVATE KEY----- BODY",
        "PuTTY-User-Key-File-2: ssh-rsa\nEncryption: none\nComment: c\nPublic-Lines: 6\nBODY",
    ],
)
def test_a_private_key_is_a_header_with_a_body(embedded: EmbeddedClassifier, key: str) -> None:
    whole = key.replace("BODY", "MIIEvQIBADANBgkqhkiG9w0BAQEF" * 3)
    header = key.replace("BODY", "...")

    assert verdict_of(embedded, whole).label == "secret:Private Key"
    assert verdict_of(embedded, header).label == "none"


@pytest.mark.parametrize("secret_type", SECRETS)
def test_a_secret_in_the_arguments_of_a_call_is_blocked(
    embedded: EmbeddedClassifier, secret_type: str
) -> None:
    arguments = json.dumps({"path": "/tmp/x", "content": f"\n{SECRETS[secret_type]}\n"})

    for text in (arguments, arguments.replace("/", "\\/")):
        assert verdict_of(embedded, text).label == f"secret:{secret_type}"


@pytest.mark.parametrize("secret_type", SECRETS)
@pytest.mark.parametrize("offset", [0, 2000, 2040, 4050, 4090, 50_000])
def test_a_secret_is_found_anywhere_in_a_long_text(
    embedded: EmbeddedClassifier, secret_type: str, offset: int
) -> None:
    text = "x = 1\n" * (offset // 6) + f" {SECRETS[secret_type]} " + "\ny = 2" * 2000

    assert verdict_of(embedded, text).label == f"secret:{secret_type}"


@pytest.mark.parametrize("direction", [Direction.INPUT, Direction.CONTEXT, Direction.TOOL_OUTPUT])
def test_a_secret_that_a_request_brings_passes(
    embedded: EmbeddedClassifier, direction: Direction
) -> None:
    assert verdict_of(embedded, f"use {SECRETS['GitHub Token']}", direction).label == "none"


@pytest.mark.slow
@pytest.mark.parametrize("repeated", ["sk-", "eyJ", "//a/", "\\", "\\u00", "aa "])
@pytest.mark.timeout(30)
def test_what_detectors_are_slow_at_is_read_in_linear_time(
    embedded: EmbeddedClassifier, repeated: str
) -> None:
    text = repeated * (100_000 // len(repeated))

    assert not verdict_of(embedded, text).blocks


# --- Both ----------------------------------------------------------------------------------------


async def test_the_embedded_classifier_judges_a_request_and_its_answer(
    embedded: EmbeddedClassifier,
) -> None:
    items: list[InputItem] = [
        Message("system", "Do not say idiot."),
        Message("user", "Read the log."),
        FunctionCall("call_1", "read", '{"path": "log"}'),
        CallOutput("call_1", "fatal: you stupid idiot"),
        Message("user", "You stupid idiot."),
    ]

    with closing(Safety(lambda: embedded)) as safety:
        await safety.warm_up()
        findings = await safety.classify_input(items)
        verdict = await safety.classify_output("The log says nothing of interest.")

    assert findings.blocked is not None
    assert findings.blocked[0] == 4
    assert dict(findings.verdicts)[3].label == "abuse"
    assert not verdict.blocks
