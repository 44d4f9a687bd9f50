"""The work before inference: from a body to a run that is ready to be sampled. Once per run."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from protocol import errors
from protocol.client_events import CreateParams, Transport, parse_create
from protocol.tools import FunctionTool, Tool, ToolChoice, ToolChoiceMode, function_tools
from sampler.chat_template import ConversationError
from sampler.conversation import Conversation
from sampler.engine import ContextLengthExceededError, Engine
from sampler.grammar import GrammarError
from sampler.params import SamplingParams, ToolConstraint
from sampler.run import Run
from server.settings import Settings
from server.telemetry import Telemetry


def new_id(prefix: str) -> str:
    """Return a fresh id such as ``resp_4f...``."""
    return f"{prefix}_{secrets.token_hex(16)}"


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Turn the engine's refusal of ``param`` into the protocol's."""
    try:
        yield
    except ContextLengthExceededError as error:
        raise errors.context_length_exceeded(error.num_tokens, error.limit) from error
    except (GrammarError, ConversationError) as error:
        raise errors.invalid_value(param, str(error)) from error


@dataclass(frozen=True)
class PreparedRun:
    """A run and what was asked for."""

    params: CreateParams
    run: Run
    pre_inference_seconds: float


class PreInference:
    """Validates, resolves the model, renders and encodes."""

    def __init__(self, engine: Engine, settings: Settings, telemetry: Telemetry) -> None:
        self._engine = engine
        self._settings = settings
        self._telemetry = telemetry

    async def prepare(self, body: dict[str, Any], transport: Transport) -> PreparedRun:
        """Return the run that ``body`` asks for; nothing is sampled yet.

        Raises:
            ProtocolError: the body is wrong; nothing was changed.
        """
        started_at = time.monotonic()
        model = self._engine.model.name
        params = parse_create(body, transport=transport, default_model=model)
        if params.model != model:
            raise errors.model_not_found(params.model)
        constraint = constraint_of(params.tools, params.tool_choice, params.parallel_tool_calls)
        await self._check_grammar(params.tools, constraint)
        run = self._open_run(params, await self._encode(params), constraint)
        self._telemetry.pre_inference.inc()
        return PreparedRun(params, run, time.monotonic() - started_at)

    async def _check_grammar(self, tools: list[Tool], constraint: ToolConstraint) -> None:
        for index, tool in enumerate(tools):
            if isinstance(tool, FunctionTool):
                with refused(f"tools[{index}].parameters"):
                    await self._engine.check_function(tool)
        with refused("tools"):
            await self._engine.check_constraint(constraint)

    async def _encode(self, params: CreateParams) -> list[int]:
        functions = function_tools(params.tools)
        with refused("input"):
            return await self._engine.encode_prompt(
                Conversation(params.input, params.instructions, functions)
            )

    def _open_run(
        self, params: CreateParams, prompt_ids: list[int], constraint: ToolConstraint
    ) -> Run:
        sampling = SamplingParams(
            params.temperature, params.top_p, self._seed(params), params.max_output_tokens
        )
        with refused("input"):
            return self._engine.open_run(new_id("resp"), prompt_ids, sampling, constraint)

    def _seed(self, params: CreateParams) -> int:
        if params.seed is not None:
            return params.seed
        return secrets.randbits(63) if self._settings.seed is None else self._settings.seed


def constraint_of(tools: list[Tool], choice: ToolChoice, parallel: bool) -> ToolConstraint:
    """Return what a tool choice means for one segment."""
    functions = tuple(function_tools(tools))
    most = None if parallel else 1
    match choice.mode:
        case ToolChoiceMode.AUTO:
            return ToolConstraint(functions, 0, most)
        case ToolChoiceMode.NONE:
            return ToolConstraint(functions, 0, 0)
        case ToolChoiceMode.REQUIRED:
            return ToolConstraint(functions, 1, most)
        case ToolChoiceMode.FUNCTION:
            named = tuple(f for f in functions if f.name == choice.name)
            return ToolConstraint(named, 1, 1)


def constraint_after_calls(params: CreateParams, choice: ToolChoice | None) -> ToolConstraint:
    """Return the constraint of a segment that follows tool outputs.

    A forced choice binds once, until the first call was sampled: otherwise a run could never end.
    ``choice`` binds the next segment anew.
    """
    if choice is None:
        forced = params.tool_choice.is_forced
        choice = ToolChoice(ToolChoiceMode.AUTO) if forced else params.tool_choice
    return constraint_of(params.tools, choice, params.parallel_tool_calls)
