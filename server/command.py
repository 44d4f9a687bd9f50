"""The command line: what the operator can choose, and what is said if it cannot be had."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import platformdirs
import torch
import typer
from rich.console import Console
from rich.progress import Progress as ProgressBars

from sampler.embedded_model import EMBEDDED_MODEL_NAME, EmbeddedModelError, Progress
from sampler.engine import Engine
from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from sampler.model_loading import LoadedModel, ModelLoadError, load_model
from sampler.runner_choice import RunnerChoiceError, RunnerOptions
from sampler.suspension_policy import Mode as SuspendPolicy
from sampler.traces import TraceError
from server.access import ApiKeyFileError, ApiKeys
from server.app import create_app
from server.engine_choice import (
    EngineChoiceError,
    RemoteOptions,
    check_is_for_local,
    kind_of,
    remote_engine,
)
from server.ledger import LedgerError
from server.model_routes import ModelRoutesError
from server.prices import PriceError
from server.process import Server, server_config
from server.response_store import StoreError
from server.safety import SafetyError
from server.settings import Settings, SettingsError

logger = logging.getLogger("server")


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"


class EndpointDialect(StrEnum):
    VLLM = "vllm"
    CEREBRAS = "cerebras"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_MISTAKES = (
    SettingsError,
    ApiKeyFileError,
    RunnerChoiceError,
    ModelLoadError,
    EmbeddedModelError,
    ModelRoutesError,
    PriceError,
    SafetyError,
    TraceError,
    StoreError,
    LedgerError,
    EngineChoiceError,
)

_GIB = 1 << 30

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


def main(
    *,
    host: Annotated[str, _listening(help="Address to listen on.")] = Settings.host,
    port: Annotated[
        int, _listening(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    log_level: Annotated[LogLevel, _listening(help="Least level to log.")] = LogLevel.INFO,
    model: Annotated[
        str | None,
        _model(
            help="A local path or Hugging Face id; or a model somewhere else (docs/engines.md): "
            "cerebras:NAME, with a key in CEREBRAS_API_KEY; openai-chat:NAME or "
            "openai-completions:NAME, with --endpoint; or vllm:PATH_OR_ID, by vLLM.",
            show_default="the embedded model",
        ),
    ] = None,
    device: Annotated[Device, _model(help="Where the model runs.")] = Device.AUTO,
    dtype: Annotated[
        Dtype,
        _model(
            help="What the weights are kept in. auto: bfloat16 on CUDA; on a processor int4 for "
            "models that were published in 4 bits, and int8 for others, where they are compiled."
        ),
    ] = Dtype.AUTO,
    exact: Annotated[
        bool, _model("--exact", help="Compute in float32, and no token depends on other runs.")
    ] = False,
    threads: Annotated[
        int | None,
        _model(min=1, help="CPU threads of the model.", show_default="one per core, at most 8"),
    ] = None,
    endpoint: Annotated[
        str | None,
        _endpoint(
            metavar="URL",
            help="Where it is: what /chat/completions or /completions is joined to.",
            show_default="that of Cerebras for cerebras:NAME",
        ),
    ] = RemoteOptions.endpoint,
    endpoint_dialect: Annotated[
        EndpointDialect,
        _endpoint(help="How an endpoint for completions is asked for token ids."),
    ] = EndpointDialect.VLLM,
    endpoint_reasoning: Annotated[
        str | None,
        _endpoint(
            metavar="MEMBER",
            help="The member of a message in which the endpoint takes thoughts back.",
            show_default="none; reasoning for cerebras:NAME",
        ),
    ] = RemoteOptions.reasoning_field,
    tokenizer: Annotated[
        str | None,
        _endpoint(
            metavar="PATH_OR_ID",
            help="The tokenizer and the chat template of openai-completions:NAME, or of "
            "vllm:PATH_OR_ID.",
            show_default="those of the embedded model; of the model itself for vllm:PATH_OR_ID",
        ),
    ] = RemoteOptions.tokenizer,
    endpoint_concurrency: Annotated[
        int, _endpoint(min=1, help="Requests in flight at once; others wait for their turn.")
    ] = RemoteOptions.max_concurrent,
    endpoint_patience: Annotated[
        float,
        _endpoint(
            min=0,
            metavar="SECONDS",
            help="How long a request is tried again while it fails in ways that may pass.",
        ),
    ] = RemoteOptions.patience_seconds,
    engine_arg: Annotated[
        list[str] | None,
        _model(
            metavar="KEY=VALUE",
            help="An engine argument of vLLM's, such as tensor_parallel_size=2. May be given "
            "again.",
            show_default="vLLM's own",
        ),
    ] = None,
    simulate: Annotated[
        float | None,
        _simulated(
            min=0,
            metavar="TOKENS/S",
            help="Simulate an accelerator that samples this fast, instead of a model; 0 is as fast "
            "as can be. What it says is made up.",
            show_default="a real model",
        ),
    ] = None,
    simulate_prefill: Annotated[
        float,
        _simulated(
            min=0, metavar="TOKENS/S", help="Tokens of prompts it reads a second; 0 as above."
        ),
    ] = 0,
    simulate_calls: Annotated[
        int, _simulated(min=0, help="Turns in which it calls a tool before it answers.")
    ] = 0,
    simulate_tool: Annotated[
        str, _simulated(help="The tool it calls, without arguments.")
    ] = "tool",
    simulate_words: Annotated[int, _simulated(min=1, help="Tokens of its answer.")] = 64,
    kv_memory: Annotated[
        float | None,
        _cache(
            min=0,
            metavar="GIB",
            help="Memory for keys and values, in GiB.",
            show_default="half of what is free",
        ),
    ] = None,
    reserve_kv: Annotated[
        bool,
        _cache(
            "--reserve-kv",
            help="Take all of it from the system at the start, not page by page as it is used.",
        ),
    ] = False,
    suspend_policy: Annotated[
        SuspendPolicy,
        _cache(
            help="What becomes of the cache of a suspended run. auto: it stays until memory is "
            "wanted; then the least useful ones are swapped out or discarded."
        ),
    ] = SuspendPolicy.AUTO,
    swap_dir: Annotated[
        Path | None,
        _cache(help="Where caches are swapped out to.", show_default="the temporary directory"),
    ] = None,
    swap_limit: Annotated[
        float | None,
        _cache(
            min=0,
            metavar="GIB",
            help="The most that is swapped out, in GiB.",
            show_default="no limit",
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        _cache(
            min=1,
            help="Tokens of prompts in one step: by so much a new run delays those that sample.",
            show_default="128 where the model is compiled, 512 otherwise",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _sampling(min=0, help="Of requests that bring none.", show_default="drawn for each"),
    ] = Settings.seed,
    max_output_tokens: Annotated[
        int | None,
        _sampling(
            min=1,
            help="The most a response may have, or a segment of one.",
            show_default="what the context window holds",
        ),
    ] = Settings.max_output_tokens,
    max_forced_string: Annotated[
        int | None,
        _sampling(
            min=0,
            help="Bound on strings of forced calls whose schema sets none; 0 is no bound.",
            show_default="64 for the embedded model, which may not end them; 0 for others",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _access(
            help="Let in only who has a key of this file, to which scripts/api-key adds.",
            show_default="all are let in",
        ),
    ] = Settings.api_key_file,
    allow_origin: Annotated[
        list[str] | None,
        _access(
            metavar="ORIGIN",
            help="Let web pages of this origin in, scheme://host[:port], or '*' for all. "
            "May be given again.",
            show_default="none",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        _access(
            metavar="NAME",
            help="Answer to this name in the Host header too. May be given again.",
            show_default="on a loopback address its own names, otherwise all",
        ),
    ] = None,
    max_connections: Annotated[
        int | None, _access(min=1, help="WebSockets that may be open.")
    ] = Settings.max_connections,
    max_connections_per_key: Annotated[
        int | None,
        _access(min=1, help="WebSockets that may be open per key.", show_default="no limit"),
    ] = Settings.max_connections_per_key,
    max_frame_bytes: Annotated[
        int, _limit(min=1, help="Longest frame or body, compressed or not.")
    ] = Settings.max_frame_bytes,
    max_queued_creates: Annotated[
        int, _limit(min=1, help="Creates that may wait on one lane.")
    ] = Settings.max_queued_creates,
    max_in_flight: Annotated[
        int, _limit(min=1, help="Responses of one connection that are sampled at a time.")
    ] = Settings.max_in_flight,
    max_lanes: Annotated[
        int, _limit(min=0, help="Named lanes that one connection may open.")
    ] = Settings.max_lanes,
    max_pending_steers: Annotated[
        int, _limit(min=1, help="Steers that may wait for one response.")
    ] = Settings.max_pending_steers,
    max_suspended_per_key: Annotated[
        int | None,
        _limit(min=1, help="Runs that may be suspended per key.", show_default="no limit"),
    ] = Settings.max_suspended_per_key,
    recent_responses: Annotated[
        int, _limit(min=0, help="Recent HTTP responses per key that keep their KV cache.")
    ] = Settings.recent_responses,
    models: Annotated[
        Path | None,
        _around(
            help="What names of models mean, and what models cost: a TOML file (docs/models.md).",
            show_default="the model's own name",
        ),
    ] = Settings.models_file,
    safety: Annotated[
        str,
        _around(
            metavar="off|embedded|MODULE:CLASS",
            help="What classifies input and output, and may block it (docs/safety.md).",
        ),
    ] = Settings.safety,
    replay: Annotated[
        list[Path] | None,
        _around(
            help="Traces that requests may have replayed (docs/traces.md). May be given again.",
            show_default="none",
        ),
    ] = None,
    suspend_ttl: Annotated[
        float, _seconds(min=0.1, help="How long a suspended run waits for its tools.")
    ] = Settings.suspend_ttl_seconds,
    connection_lifetime: Annotated[
        float, _seconds(min=0.1, help="How long a WebSocket may be open.")
    ] = Settings.connection_lifetime_seconds,
    send_timeout: Annotated[
        float, _seconds(min=0.1, help="How long a client may read nothing.")
    ] = Settings.send_timeout_seconds,
    ping_interval: Annotated[
        float, _seconds(min=0, help="How often WebSockets are pinged; 0 is never.")
    ] = Settings.ping_interval_seconds,
    drain: Annotated[
        float, _seconds(min=0, help="How long responses may go on after SIGTERM or Ctrl-C.")
    ] = Settings.drain_seconds,
    store: Annotated[
        bool, _storage("--store/--no-store", help="Whether responses that ask for it are stored.")
    ] = Settings.store,
    ledger: Annotated[
        bool | None,
        _storage(
            "--ledger/--no-ledger",
            help="Whether usage and cost of each run are recorded.",
            show_default="if responses are stored, or --data-dir is given",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        _storage(help="Where responses and the ledger are.", show_default="by the system's custom"),
    ] = None,
    store_ttl: Annotated[
        float, _storage(min=0.1, metavar="SECONDS", help="How long they are stored, in seconds.")
    ] = Settings.store_ttl_seconds,
) -> None:
    """Serve a local model by the Responses API, with a sampler that suspends at tool calls.

    The first SIGTERM or Ctrl-C lets what is being sampled end, the second ends the process.
    """
    _set_up_logging(log_level)
    with _mistakes_told():
        options = RunnerOptions(
            dtype=dtype.value,
            is_exact=exact,
            kv_memory=None if kv_memory is None else round(kv_memory * _GIB),
            num_threads=threads,
        )
        has_ledger = (store or data_dir is not None) if ledger is None else ledger
        settings = Settings(
            seed=seed,
            host=host,
            api_key_file=api_key_file,
            allowed_origins=tuple(allow_origin or ()),
            allowed_hosts=tuple(allow_host or ()),
            max_connections=max_connections,
            max_connections_per_key=max_connections_per_key,
            max_frame_bytes=max_frame_bytes,
            max_queued_creates=max_queued_creates,
            max_in_flight=max_in_flight,
            max_lanes=max_lanes,
            max_pending_steers=max_pending_steers,
            max_output_tokens=max_output_tokens,
            max_suspended_per_key=max_suspended_per_key,
            recent_responses=recent_responses,
            suspend_ttl_seconds=suspend_ttl,
            connection_lifetime_seconds=connection_lifetime,
            send_timeout_seconds=send_timeout,
            ping_interval_seconds=ping_interval,
            drain_seconds=drain,
            models_file=models,
            safety=safety,
            replay_files=tuple(replay or ()),
            store=store,
            ledger=has_ledger,
            data_dir=data_dir or (_default_data_dir() if store or has_ledger else None),
            store_ttl_seconds=store_ttl,
        )
        if api_key_file is not None:
            ApiKeys.from_file(api_key_file)  # before a model is loaded, which may take minutes
        for warning in settings.warnings():
            logger.warning("%s", warning)
        remote = RemoteOptions(
            endpoint=endpoint,
            dialect=endpoint_dialect.value,
            reasoning_field=endpoint_reasoning,
            tokenizer=tokenizer,
            max_concurrent=endpoint_concurrency,
            patience_seconds=endpoint_patience,
            max_tokens=max_output_tokens or RemoteOptions.max_tokens,
            engine_args=tuple(engine_arg or ()),
            max_forced_string=max_forced_string,
        )
        if model is not None and simulate is None and kind_of(model):
            with _conversion_shown() as progress:
                engine = remote_engine(model, remote, progress)
        else:
            check_is_for_local(remote)
            if simulate is None:
                loaded = _load(model, device, options)
                torch.set_num_threads(loaded.runner.torch_threads(options.threads))
            else:
                script = Script.of_calls(simulate_calls, simulate_tool, num_words=simulate_words)
                loaded = _load_simulated(
                    simulate or None, simulate_prefill or None, script, options
                )
            if reserve_kv:
                loaded.runner.reserve_memory()
            if max_forced_string is None:
                max_forced_string = 64 if loaded.name == EMBEDDED_MODEL_NAME else 0
            engine = LocalEngine(
                loaded,
                max_forced_string=max_forced_string,
                prefill_chunk=prefill_chunk,
                suspend_policy=suspend_policy,
                swap_directory=swap_dir,
                swap_bytes=None if swap_limit is None else round(swap_limit * _GIB),
            )
        try:
            _serve(engine, settings, port)
        finally:
            engine.close()


@contextmanager
def _mistakes_told() -> Iterator[None]:
    """End with one line where the operator can do something about it."""
    try:
        yield
    except _MISTAKES as error:
        raise SystemExit(f"server: {error}") from error


def _default_data_dir() -> Path:
    return platformdirs.user_data_path("suspended-sampling")


def _set_up_logging(log_level: LogLevel) -> None:
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    uvicorn = logging.getLogger("uvicorn.error")
    if log_level is LogLevel.DEBUG:
        uvicorn.setLevel(logging.INFO)  # or it would log headers, and with them API keys
    elif log_level is LogLevel.INFO:
        uvicorn.setLevel(logging.WARNING)  # it says what we say too
    uvicorn.addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    """Whether a record is not uvicorn's error of each upgrade that was refused, and each stream
    that was given up, which are none."""
    return not record.getMessage().startswith("ASGI callable returned without completing ")


def _load(model: str | None, device: Device, options: RunnerOptions) -> LoadedModel:
    with _conversion_shown() as progress:
        return load_model(model, device=device.value, options=options, progress=progress)


def _load_simulated(
    decode_rate: float | None, prefill_rate: float | None, script: Script, options: RunnerOptions
) -> LoadedModel:
    kv_memory = options.kv_memory_on(torch.device("cpu"))
    with _conversion_shown() as progress:
        return simulated_model(
            decode_rate,
            prefill_rate,
            script=script,
            kv_format=SMOLLM2_KV,
            kv_memory=kv_memory,
            progress=progress,
        )


@contextmanager
def _conversion_shown() -> Iterator[Progress]:
    console = Console(stderr=True)
    with ProgressBars(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("converting the model (once)", visible=False)

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, visible=True)

        yield show


def _serve(engine: Engine, settings: Settings, port: int) -> None:
    app = create_app(engine, settings)
    config = server_config(app, settings, port)
    server = Server(config, app.state.draining, settings.drain_seconds, engine)
    server.run()
    if not server.started:
        raise SystemExit(1)  # uvicorn has said why
    logger.info("shutdown 4/4: stopping the engine")
