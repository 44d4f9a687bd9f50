"""What was measured, as it is written to the report's JSON: numbers and nothing made of them."""

from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct


class Design(StrEnum):
    """How an agent run is held."""

    STATELESS_CACHE = "stateless+cache"
    """Each request brings the whole history; tokens, model configuration and KV prefix are kept."""
    STATELESS_CACHE_RECONNECT = "stateless+cache, new connections"
    """The same without keep-alive."""
    STATELESS = "stateless"
    """Each request brings the whole history, and nothing is kept."""
    STATELESS_RECONNECT = "stateless, new connections"
    CHAINED = "chained"
    """``previous_response_id`` over one WebSocket."""
    SUSPENDED = "suspended"
    """One response over one WebSocket, continued by ``response.append``."""
    SUSPENDED_INJECT = "suspended, inject"
    """The same, continued by ``response.inject``."""
    AGAIN = "stateless+cache, again"
    """The baseline a second time, as noise floor (A/A)."""
    SUSPENDED_AGAIN = "suspended, again"


class Split(Struct, frozen=True, kw_only=True):
    """Where the seconds of one turn went; together they are the turn without its tools.

    Of a turn that an endpoint sampled, which tells its times, ``prefill``, ``decode`` and its part
    of ``queue`` are by the endpoint's own clock.
    """

    network: float
    """What the client waited for and the server knows nothing of: transport, framing, parsing by
    the client, waiting for the event loop."""
    pre_inference: float
    queue: float
    prefill: float
    decode: float
    post_inference: float
    """That part of it that the client waits for."""
    upstream: float = 0.0
    """What the server waited for an endpoint that the endpoint knows nothing of: the way there and
    back. It is in ``prefill`` and ``decode`` where an endpoint tells no times."""


class EndpointTimes(Struct, frozen=True, kw_only=True):
    """How long a turn took an endpoint, by its own clock, in seconds."""

    queue: float
    prompt: float
    completion: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.queue + self.prompt + self.completion


class EndpointTurn(Struct, frozen=True, kw_only=True):
    """What there was to tell of a turn that an endpoint sampled."""

    tries: int
    """How often the endpoint was asked for it."""
    admission: float
    """Seconds that the request waited in the server for its place among those in flight."""
    times: EndpointTimes | None
    """None where the endpoint does not tell."""


class Turn(Struct, frozen=True, kw_only=True):
    """One turn of the model: a request, or a segment of a suspended run."""

    seconds: float
    """From what was sent to the end of the turn, as the client saw it; no tool runs meanwhile."""
    first_event_seconds: float
    """From what was sent to the first event of the model's output."""
    first_token_seconds: float | None
    """The server's: from the request received to the first token sampled."""
    split: Split | None
    """None for a server that does not tell."""
    tool_seconds: float
    """How long the tools then ran."""
    input_tokens: int
    """The whole context."""
    cached_tokens: int
    output_tokens: int
    tokens_forwarded: int | None
    bytes_sent: int
    bytes_received: int
    endpoint: EndpointTurn | None = None
    """None where the server sampled it itself. Where an endpoint did, tokens are those that it
    counts, and forwarded are the input less what was cached, and the output."""


class AgentRun(Struct, frozen=True, kw_only=True):
    """One agent run, held to its end."""

    seconds: float
    """From the first request to the last event, without the time that tools took."""
    wall_seconds: float
    turns: list[Turn]


class Trial(Struct, frozen=True, kw_only=True):
    """Some agent runs at once, held in one design: one measurement."""

    experiment: str
    """Such as ``calls``."""
    engine: str
    """Such as ``int4`` or ``simulated 1000``."""
    workload: str
    """A label that is unique within the experiment, such as ``20 calls``."""
    x: float
    """What the experiment varies: calls, tokens, tokens a second, seconds."""
    design: str
    """A value of ``Design``, or the name of an outside server."""
    round: int
    concurrency: int
    runs: list[AgentRun]
    seconds: float
    """Of the whole trial."""
    cpu_seconds: float | None
    """Of the server's process."""
    counts: dict[str, float]
    """Differences of the server's counters over the trial: ``tokens_forwarded``,
    ``tokens_reforwarded``, ``template_renders``, ``encodes``, ``tokens_encoded``, and per stage
    ``stage_runs:NAME``, ``stage_items:NAME`` and ``stage_seconds:NAME``."""
    loop_lag: dict[str, float]
    """Cumulative counts of the event loop's lag by upper bound in seconds, as Prometheus has it."""


class Agreement(Struct, frozen=True, kw_only=True):
    """Whether a design samples the tokens of another one: free sampling, in exact mode."""

    design: str
    sampler: str
    """Such as ``greedy`` or ``temperature 0.7``."""
    num_runs: int
    num_turns: int
    num_tokens: int
    equal_runs: int
    """Runs all of whose sampled tokens are those of the suspended one."""
    drifted_turns: int
    """Turns whose context was encoded into other tokens than the suspended run has there."""
    differing_tokens: int
    """Tokens sampled in turns up to and including the first that differs, which are not the
    same."""


class Results(Struct, kw_only=True):
    """Everything, whether or not it came to its end."""

    command: str
    """What to type to have this again."""
    began_at: float
    """Unix seconds."""
    seconds: float = 0.0
    is_complete: bool = False
    is_quick: bool = False
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}
    trials: list[Trial] = []
    agreements: list[Agreement] = []
    notes: list[str] = []
    """What a reader has to know of this very measurement: what was left out, and why."""

    def encode(self) -> bytes:
        """Return JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def decode(data: bytes) -> "Results":
        """Return what ``encode`` made."""
        return msgspec.json.decode(data, type=Results)
