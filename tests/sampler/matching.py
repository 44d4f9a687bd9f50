"""Texts and tokens against constraints."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from protocol.items import CustomToolCall
from protocol.tools import CustomFormat, CustomTool
from sampler.conversation import call_text
from sampler.grammar import GrammarCompiler
from sampler.matcher import Matcher
from sampler.params import Constraint
from sampler.tokenizer import Tokenizer
from tests.sampler.smollm2 import smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, byte_tokenizer

BYTE_LEVEL = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END], 288)
STOP_IDS = [END_OF_TEXT, IM_END]


def free_form_tool(name: str, syntax: str = "text", definition: str = "") -> CustomTool:
    """Return a tool that takes any text, or what a grammar says."""
    assert syntax in ("text", "lark", "regex")
    return CustomTool(name, None, CustomFormat(syntax, definition), {})  # type: ignore[arg-type]


def input_text(name: str, text: str) -> str:
    """Return the text in which a model calls a free-form tool."""
    return call_text(CustomToolCall("call_1", name, text))


def new_matcher(compiler: GrammarCompiler, constraint: Constraint) -> Matcher:
    matcher = compiler.matcher(constraint)
    assert matcher is not None
    return matcher


def num_accepted(matcher: Matcher, ids: Sequence[int]) -> int:
    """Move past as many of ``ids`` as the mask allows, and return how many that were."""
    for index, token_id in enumerate(ids):
        if not matcher.mask()[token_id]:
            return index
        matcher.accept(token_id)
    return len(ids)


def may_end(matcher: Matcher) -> bool:
    allowed = matcher.mask()[STOP_IDS]
    assert allowed.all() == allowed.any(), "the stop ids are one as good as the other"
    return bool(allowed.all())


def admits(matcher: Matcher, ids: Sequence[int]) -> bool:
    """Tell whether ``ids`` may be all of a turn."""
    return num_accepted(matcher, ids) == len(ids) and may_end(matcher)


def admits_text(compiler: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    return admits(new_matcher(compiler, constraint), BYTE_LEVEL.encode_text(text))


def refused(matcher: Matcher, text: str) -> str:
    """Return what of ``text`` is left when the first byte of it is refused."""
    ids = BYTE_LEVEL.encode_text(text)
    return b"".join(map(BYTE_LEVEL.token_bytes, ids[num_accepted(matcher, ids) :])).decode()


def cut_otherwise(text: str, length: int) -> list[int]:
    """Return ids of ``text`` that the tokenizer would not have chosen."""
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    return [i for piece in pieces for i in smollm2_tokenizer().encode_text(piece)]


class WideTokenizer(Tokenizer):
    """Bytes, and tokens of several characters."""

    def __init__(self, words: Sequence[str]) -> None:
        description = json.loads(byte_tokenizer().to_str())
        spelled = [word.replace("\n", "Ċ").replace(" ", "Ġ") for word in words]
        description["model"]["vocab"] |= {word: 259 + i for i, word in enumerate(spelled)}
        super().__init__(FastTokenizer.from_str(json.dumps(description)), STOP_IDS)
        self._words = list(words)

    def ids_of(self, pieces: Sequence[str]) -> list[int]:
        """Return the ids of ``pieces``, each as one token if it is one of the words."""
        return [
            token_id
            for piece in pieces
            for token_id in (
                [259 + self._words.index(piece)]
                if piece in self._words
                else BYTE_LEVEL.encode_text(piece)
            )
        ]
