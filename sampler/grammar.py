"""Hard constraints on what the model may sample, by llguidance.

A tool constraint becomes a Lark grammar over the text of one assistant turn. Where calls are
allowed, free text may come first, and from the moment the text contains the begin marker the rest
must be well-formed calls whose arguments match the function's JSON schema. Where they are not, the
marker cannot be completed at all. So arguments that reach a client always parse and validate, in
``auto`` as in ``required``; only the end of the token budget can cut a call short.
"""

import json
import re

import llguidance
import numpy as np

from protocol.tools import FunctionTool
from sampler.json_schema import arguments_schema
from sampler.params import ToolConstraint
from sampler.tokenizer import Tokenizer
from sampler.tool_calls import BEGIN, END


class GrammarError(ValueError):
    """A JSON schema that cannot be turned into a grammar."""


class Matcher:
    """Where one segment is in its grammar. While a step is in flight it is the model thread's."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)

    def mask(self) -> np.ndarray:
        """Return ``(vocab,)`` bool: which tokens may come next. End-of-turn tokens are among them
        where the turn may end."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> None:
        """Move past ``token_id``, which the mask allowed."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(f"grammar refused a token it allowed: {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles constraints for one tokenizer; equal grammars are compiled once."""

    def __init__(self, tokenizer: Tokenizer, max_forced_string: int = 64) -> None:
        """Compile for ``tokenizer``.

        Args:
            tokenizer: gives the vocabulary and the ids that end a turn.
            max_forced_string: the bound, in characters, on strings of forced calls whose schema
                sets none; 0 for no bound. Small models that are made to call may otherwise never
                end a string.
        """
        self._tokenizer = tokenizer
        self._max_forced_string = max_forced_string
        self._compiled: dict[str, llguidance.LLMatcher] = {}

    def check(self, function: FunctionTool) -> None:
        """Make sure that calls of ``function`` can be constrained, forced or not.

        Raises:
            GrammarError: its parameters schema cannot be compiled; says why.
        """
        for min_calls in (0, 1):
            self._compile(self._grammar(ToolConstraint((function,), min_calls, 1)))

    def matcher(self, constraint: ToolConstraint) -> Matcher | None:
        """Return a fresh matcher for one segment, or None where there is nothing to constrain."""
        if not constraint.functions:
            return None
        return Matcher(
            self._compile(self._grammar(constraint)).deep_copy(), self._tokenizer.vocab_size
        )

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if (compiled := self._compiled.get(grammar)) is None:
            compiled = llguidance.LLMatcher(self._tokenizer.guidance, grammar, log_level=0)
            if compiled.is_error():
                raise GrammarError(_reason(compiled.get_error()))
            if len(self._compiled) >= 256:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = compiled
        return compiled

    def _grammar(self, constraint: ToolConstraint) -> str:
        if not constraint.allows_calls:
            return _text_without_calls()
        bound = self._max_forced_string if constraint.is_forced else 0
        return _calls(constraint, bound)


def _text_without_calls() -> str:
    return f"%llguidance {{}}\nstart: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*){BEGIN}(?s:.*)/\n"


def _calls(constraint: ToolConstraint, max_string: int) -> str:
    # The first call is spelled out, the others repeat.
    least = max(constraint.min_calls - 1, 0)
    most = "" if constraint.max_calls is None else constraint.max_calls - 1
    more = "" if most == 0 else f" ({_literal(f'{chr(10)}{BEGIN}')} body){{{least},{most}}}"
    forced = f"{_literal(BEGIN)} body{more}"
    lines = ["%llguidance {}"]
    if constraint.is_forced:
        lines.append(f"start: {forced}")
    else:
        lines += [
            f"start: TEXT | begin body{more}",
            "TEXT: /(?s:.*)/",
            # Lazy: the marker ends the text as soon as it is complete.
            f"begin[lazy]: TEXT {_literal(BEGIN)}",
        ]
    functions = constraint.functions
    lines.append("body: " + " | ".join(f"body_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
        schema = json.dumps(arguments_schema(function.parameters, max_string))
        lines.append(
            f"body_{index}: {_literal(head)} arguments_{index} {_literal('}' + chr(10) + END)}"
        )
        lines.append(f"arguments_{index}: %json {schema}")
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text)


def _reason(error: str) -> str:
    """Return what llguidance says is wrong, in one line, without where that is in our grammar."""
    said = re.split(r"\n +\d+ \| ", error)[0]
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^")]
    return re.sub(r"^at \d+\(\d+\): ", "", " ".join(lines)) or "unknown error"
