"""The options of the command line: of each one its type, its bounds and what is said of it.

What they are if they are not given is in the signature of ``command.main``.
"""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from sampler.suspension_policy import Mode
from server.settings import default_data_dir


class DeviceName(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class DtypeName(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"


class KVDtypeName(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class DialectName(StrEnum):
    VLLM = "vllm"
    CEREBRAS = "cerebras"


class LogLevelName(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_MAX_GIB = 1 << 30
"""As many bytes as no machine has, and still a number that can be reckoned with."""
_MAX_CALLS = 1_000_000

_listening = partial(typer.Option, rich_help_panel="Listening")
_model = partial(typer.Option, rich_help_panel="Model")
_endpoint = partial(typer.Option, rich_help_panel="Model somewhere else")
_cache = partial(typer.Option, rich_help_panel="KV cache")
_simulated = partial(typer.Option, rich_help_panel="Simulated accelerator")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_access = partial(typer.Option, rich_help_panel="Access")
_limit = partial(typer.Option, rich_help_panel="Limits")
_seconds = partial(typer.Option, rich_help_panel="Times, in seconds", metavar="SECONDS")
_around = partial(typer.Option, rich_help_panel="Before and after inference")
_storage = partial(typer.Option, rich_help_panel="Storage")

Host: TypeAlias = Annotated[str, _listening(help="Address to listen on.")]
Port: TypeAlias = Annotated[
    int, _listening(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
]
LogLevel: TypeAlias = Annotated[LogLevelName, _listening(help="Least level to log.")]
Model: TypeAlias = Annotated[
    str | None,
    _model(
        help="A local path or Hugging Face id; or a model somewhere else (docs/engines.md): "
        "cerebras:NAME, with a key in CEREBRAS_API_KEY; openai-chat:NAME or "
        "openai-completions:NAME, with --endpoint; or vllm:PATH_OR_ID, by vLLM.",
        show_default="the embedded model",
    ),
]
Device: TypeAlias = Annotated[DeviceName, _model(help="Where the model runs.")]
Dtype: TypeAlias = Annotated[
    DtypeName,
    _model(
        help="What the weights are kept in. auto: bfloat16 on CUDA; on a processor int4 for "
        "models that were published in 4 bits, and int8 for others, where they are compiled."
    ),
]
Exact: TypeAlias = Annotated[
    bool, _model("--exact", help="Compute in float32, and no token depends on other runs.")
]


def parse_threads(text: str) -> int | None:
    """Return how many threads ``text`` asks for; None where that is to be chosen.

    Raises:
        typer.BadParameter: it asks for nothing of that kind.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected auto, or a number of at least 1, not {text!r}")
    return int(text)


Threads: TypeAlias = Annotated[
    int | None,
    _model(
        parser=parse_threads,
        metavar="auto|NUMBER",
        help="CPU threads of the model. auto: one on each core that the process may use, at "
        "most 8.",
        show_default="auto",
    ),
]
CUDAGraphs: TypeAlias = Annotated[
    bool,
    _model(
        "--cuda-graphs/--no-cuda-graphs",
        help="Whether a step on CUDA that decodes is recorded once and then launched as a whole.",
    ),
]
Endpoint: TypeAlias = Annotated[
    str | None,
    _endpoint(
        metavar="URL",
        help="Where it is: what /chat/completions or /completions is joined to.",
        show_default="that of Cerebras for cerebras:NAME",
    ),
]
EndpointDialect: TypeAlias = Annotated[
    DialectName,
    _endpoint(help="How an endpoint for completions is asked for token ids."),
]
EndpointReasoning: TypeAlias = Annotated[
    str | None,
    _endpoint(
        metavar="MEMBER",
        help="The member of a message in which the endpoint takes thoughts back.",
        show_default="none; reasoning for cerebras:NAME",
    ),
]
EndpointOmit: TypeAlias = Annotated[
    list[str] | None,
    _endpoint(
        metavar="MEMBER",
        help="A member of requests that the endpoint does not take, such as seed. May be given "
        "again.",
        show_default="none",
    ),
]
EndpointMaxTokensMember: TypeAlias = Annotated[
    str,
    _endpoint(
        metavar="MEMBER",
        help="The member of a chat request that bounds how much is sampled.",
    ),
]
Tokenizer: TypeAlias = Annotated[
    str | None,
    _endpoint(
        metavar="PATH_OR_ID",
        help="The tokenizer and the chat template of openai-completions:NAME, or of "
        "vllm:PATH_OR_ID.",
        show_default="those of the embedded model; of the model itself for vllm:PATH_OR_ID",
    ),
]
EndpointConcurrency: TypeAlias = Annotated[
    int, _endpoint(min=1, help="Requests in flight at once; others wait for their turn.")
]
EndpointPatience: TypeAlias = Annotated[
    float,
    _endpoint(
        min=0,
        metavar="SECONDS",
        help="How long a request is tried again while it fails in ways that may pass.",
    ),
]
EndpointSilence: TypeAlias = Annotated[
    float,
    _endpoint(
        min=0.1,
        metavar="SECONDS",
        help="How long an endpoint may say nothing, before an answer and within it.",
    ),
]
EngineArg: TypeAlias = Annotated[
    list[str] | None,
    _model(
        metavar="KEY=VALUE",
        help="An engine argument of vLLM's, such as tensor_parallel_size=2. May be given again.",
        show_default="vLLM's own",
    ),
]
Simulate: TypeAlias = Annotated[
    float | None,
    _simulated(
        min=0,
        metavar="TOKENS/S",
        help="Simulate an accelerator that samples this fast, instead of a model; 0 is as fast "
        "as can be. What it says is made up.",
        show_default="a real model",
    ),
]
# That nothing was chosen has to be told from the default: they mean nothing without --simulate.
SimulatePrefill: TypeAlias = Annotated[
    float | None,
    _simulated(
        min=0,
        metavar="TOKENS/S",
        help="Tokens of prompts it reads a second; 0 as above.",
        show_default="0",
    ),
]
SimulateCalls: TypeAlias = Annotated[
    int | None,
    _simulated(
        min=0,
        max=_MAX_CALLS,
        help="Turns in which it calls a tool before it answers.",
        show_default="0",
    ),
]
SimulateTool: TypeAlias = Annotated[
    str | None, _simulated(help="The tool it calls, without arguments.", show_default="tool")
]
SimulateWords: TypeAlias = Annotated[
    int | None, _simulated(min=1, help="Tokens of its answer.", show_default="64")
]
KVMemory: TypeAlias = Annotated[
    float | None,
    _cache(
        min=0,
        max=_MAX_GIB,
        metavar="GIB",
        help="Memory for keys and values, in GiB.",
        show_default="half of what is free",
    ),
]
KVDtype: TypeAlias = Annotated[
    KVDtypeName,
    _cache(
        help="What keys and values are kept in, where a model is compiled. auto: float32 beside "
        "float32 weights, and bfloat16 beside others; int8 takes half of that.",
    ),
]
ReserveKV: TypeAlias = Annotated[
    bool,
    _cache(
        "--reserve-kv",
        help="Take all of it from the system at the start, not page by page as it is used.",
    ),
]
SuspendPolicy: TypeAlias = Annotated[
    Mode,
    _cache(
        help="What becomes of the cache of a suspended run. auto: it stays until memory is "
        "wanted; then the least useful ones are swapped out or discarded."
    ),
]
SwapDir: TypeAlias = Annotated[
    Path | None,
    _cache(help="Where caches are swapped out to.", show_default="the temporary directory"),
]
SwapLimit: TypeAlias = Annotated[
    float | None,
    _cache(
        min=0,
        max=_MAX_GIB,
        metavar="GIB",
        help="The most that is swapped out, in GiB.",
        show_default="no limit",
    ),
]
PrefillChunk: TypeAlias = Annotated[
    int | None,
    _cache(
        min=1,
        help="Tokens of prompts in one step: by so much a new run delays those that sample.",
        show_default="128 where the model is compiled, 512 otherwise",
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    _sampling(min=0, help="Of requests that bring none.", show_default="drawn for each"),
]
MaxOutputTokens: TypeAlias = Annotated[
    int | None,
    _sampling(
        min=1,
        help="The most a response may have, or a segment of one.",
        show_default="what the context window holds",
    ),
]
MaxForcedString: TypeAlias = Annotated[
    int | None,
    _sampling(
        min=0,
        help="Bound on strings of forced calls whose schema sets none; 0 is no bound.",
        show_default="64 for the embedded model, which may not end them; 0 for others",
    ),
]
ApiKeyFile: TypeAlias = Annotated[
    Path | None,
    _access(
        help="Let in only who has a key of this file, to which scripts/api-key adds.",
        show_default="all are let in",
    ),
]
AllowOrigin: TypeAlias = Annotated[
    list[str] | None,
    _access(
        metavar="ORIGIN",
        help="Let web pages of this origin in, scheme://host[:port], or '*' for all. "
        "May be given again.",
        show_default="none",
    ),
]
AllowHost: TypeAlias = Annotated[
    list[str] | None,
    _access(
        metavar="NAME",
        help="Answer to this name in the Host header too. May be given again.",
        show_default="on a loopback address its own names, otherwise all",
    ),
]
MaxConnections: TypeAlias = Annotated[
    int | None, _access(min=1, help="WebSockets that may be open.")
]
MaxConnectionsPerKey: TypeAlias = Annotated[
    int | None,
    _access(min=1, help="WebSockets that may be open per key.", show_default="no limit"),
]
MaxFrameBytes: TypeAlias = Annotated[
    int, _limit(min=1, help="Longest frame or body, compressed or not.")
]
MaxQueuedCreates: TypeAlias = Annotated[
    int, _limit(min=1, help="Creates that may wait on one lane.")
]
MaxInFlight: TypeAlias = Annotated[
    int, _limit(min=1, help="Responses of one connection that are sampled at a time.")
]
MaxLanes: TypeAlias = Annotated[
    int, _limit(min=0, help="Named lanes that one connection may open.")
]
MaxPendingSteers: TypeAlias = Annotated[
    int, _limit(min=1, help="Steers that may wait for one response.")
]
MaxSuspendedPerKey: TypeAlias = Annotated[
    int | None,
    _limit(min=1, help="Runs that may be suspended per key.", show_default="no limit"),
]
RecentResponses: TypeAlias = Annotated[
    int, _limit(min=0, help="Recent HTTP responses per key that keep their KV cache.")
]
Models: TypeAlias = Annotated[
    Path | None,
    _around(
        help="What names of models mean, and what models cost: a TOML file (docs/models.md).",
        show_default="the model's own name",
    ),
]
Safety: TypeAlias = Annotated[
    str,
    _around(
        metavar="off|embedded|MODULE:CLASS",
        help="What classifies input and output, and may block it (docs/safety.md).",
    ),
]
Replay: TypeAlias = Annotated[
    list[Path] | None,
    _around(
        help="Traces that requests may have replayed (docs/traces.md). May be given again.",
        show_default="none",
    ),
]
SuspendTtl: TypeAlias = Annotated[
    float, _seconds(min=0.1, help="How long a suspended run waits for its tools.")
]
ConnectionLifetime: TypeAlias = Annotated[
    float, _seconds(min=0.1, help="How long a WebSocket may be open.")
]
SendTimeout: TypeAlias = Annotated[
    float, _seconds(min=0.1, help="How long a client may read nothing.")
]
PingInterval: TypeAlias = Annotated[
    float, _seconds(min=0, help="How often WebSockets are pinged; 0 is never.")
]
Drain: TypeAlias = Annotated[
    float, _seconds(min=0, help="How long responses may go on after SIGTERM or Ctrl-C.")
]
Store: TypeAlias = Annotated[
    bool, _storage("--store/--no-store", help="Whether responses that ask for it are stored.")
]
Ledger: TypeAlias = Annotated[
    bool | None,
    _storage(
        "--ledger/--no-ledger",
        help="Whether usage and cost of each run are recorded.",
        show_default="if responses are stored, or --data-dir is given",
    ),
]
DataDir: TypeAlias = Annotated[
    Path | None,
    _storage(
        help="Where responses and the ledger are. Two servers cannot share it.",
        show_default=str(default_data_dir()),
    ),
]
StoreTtl: TypeAlias = Annotated[
    float, _storage(min=0.1, metavar="SECONDS", help="How long they are stored, in seconds.")
]
