"""The command line: what the operator can choose, and what is said if it cannot be had."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket

import torch
from rich.console import Console
from rich.progress import Progress as ProgressBars

from sampler.embedded_model import EMBEDDED_MODEL_NAME, EmbeddedModelError, Progress
from sampler.engine import Engine
from sampler.engines.simulated.model import SMOLLM2_KV, simulated_model, simulated_name
from sampler.engines.simulated.script import Script
from sampler.local_engine import LocalEngine
from sampler.main_memory import TooLittleMemoryError
from sampler.model_loading import LoadedModel, ModelLoadError, load_model
from sampler.runner_choice import RunnerChoiceError, RunnerOptions
from sampler.suspension_policy import Mode as SuspendPolicy
from sampler.traces import TraceError
from server import command_options as options
from server.access import ApiKeyFileError
from server.app import create_app
from server.engine_choice import (
    EngineChoiceError,
    Kind,
    RemoteOptions,
    check_choice,
    kind_of,
    name_of,
    remote_engine,
)
from server.folders import obstacle_to
from server.ledger import LedgerError
from server.model_routes import ModelRoutesError
from server.operator_files import OperatorFiles, read_operator_files
from server.prices import PriceError
from server.process import ListenError, Server, bound_sockets, server_config
from server.response_store import StoreError
from server.safety import SafetyError, find_classifier
from server.services import check_storage
from server.settings import Settings, SettingsError, default_data_dir

logger = logging.getLogger("server")

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
    ListenError,
    EngineChoiceError,
    TooLittleMemoryError,
)

_GIB = 1 << 30


def main(
    *,
    host: options.Host = Settings.host,
    port: options.Port = 8000,
    log_level: options.LogLevel = options.LogLevelName.INFO,
    model: options.Model = None,
    device: options.Device = options.DeviceName.AUTO,
    dtype: options.Dtype = options.DtypeName.AUTO,
    exact: options.Exact = False,
    threads: options.Threads = None,
    cuda_graphs: options.CUDAGraphs = True,
    endpoint: options.Endpoint = RemoteOptions.endpoint,
    endpoint_dialect: options.EndpointDialect = options.DialectName.VLLM,
    endpoint_reasoning: options.EndpointReasoning = RemoteOptions.reasoning_field,
    endpoint_omit: options.EndpointOmit = None,
    endpoint_max_tokens_member: options.EndpointMaxTokensMember = RemoteOptions.max_tokens_member,
    tokenizer: options.Tokenizer = RemoteOptions.tokenizer,
    endpoint_concurrency: options.EndpointConcurrency = RemoteOptions.max_concurrent,
    endpoint_patience: options.EndpointPatience = RemoteOptions.patience_seconds,
    endpoint_silence: options.EndpointSilence = RemoteOptions.silence_seconds,
    engine_arg: options.EngineArg = None,
    simulate: options.Simulate = None,
    simulate_prefill: options.SimulatePrefill = None,
    simulate_calls: options.SimulateCalls = None,
    simulate_tool: options.SimulateTool = None,
    simulate_words: options.SimulateWords = None,
    kv_memory: options.KVMemory = None,
    kv_dtype: options.KVDtype = options.KVDtypeName.AUTO,
    reserve_kv: options.ReserveKV = False,
    suspend_policy: options.SuspendPolicy = SuspendPolicy.AUTO,
    swap_dir: options.SwapDir = None,
    swap_limit: options.SwapLimit = None,
    prefill_chunk: options.PrefillChunk = None,
    seed: options.Seed = Settings.seed,
    max_output_tokens: options.MaxOutputTokens = Settings.max_output_tokens,
    max_forced_string: options.MaxForcedString = None,
    api_key_file: options.ApiKeyFile = Settings.api_key_file,
    allow_origin: options.AllowOrigin = None,
    allow_host: options.AllowHost = None,
    max_connections: options.MaxConnections = Settings.max_connections,
    max_connections_per_key: options.MaxConnectionsPerKey = Settings.max_connections_per_key,
    max_frame_bytes: options.MaxFrameBytes = Settings.max_frame_bytes,
    max_queued_creates: options.MaxQueuedCreates = Settings.max_queued_creates,
    max_in_flight: options.MaxInFlight = Settings.max_in_flight,
    max_lanes: options.MaxLanes = Settings.max_lanes,
    max_pending_steers: options.MaxPendingSteers = Settings.max_pending_steers,
    max_suspended_per_key: options.MaxSuspendedPerKey = Settings.max_suspended_per_key,
    recent_responses: options.RecentResponses = Settings.recent_responses,
    models: options.Models = Settings.models_file,
    safety: options.Safety = Settings.safety,
    replay: options.Replay = None,
    suspend_ttl: options.SuspendTtl = Settings.suspend_ttl_seconds,
    connection_lifetime: options.ConnectionLifetime = Settings.connection_lifetime_seconds,
    send_timeout: options.SendTimeout = Settings.send_timeout_seconds,
    ping_interval: options.PingInterval = Settings.ping_interval_seconds,
    drain: options.Drain = Settings.drain_seconds,
    store: options.Store = Settings.store,
    ledger: options.Ledger = None,
    data_dir: options.DataDir = None,
    store_ttl: options.StoreTtl = Settings.store_ttl_seconds,
) -> None:
    """Serve a local model by the Responses API, with a sampler that suspends at tool calls.

    The first SIGTERM or Ctrl-C lets what is being sampled end, the second ends the process.
    """
    _set_up_logging(log_level)
    with _mistakes_told(), ExitStack() as resources:
        runner_options = RunnerOptions(
            dtype=dtype.value,
            is_exact=exact,
            kv_memory=None if kv_memory is None else round(kv_memory * _GIB),
            num_threads=threads,
            kv_dtype=kv_dtype.value,
            cuda_graphs=cuda_graphs,
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
            data_dir=data_dir or (default_data_dir() if store or has_ledger else None),
            store_ttl_seconds=store_ttl,
        )
        for warning in settings.warnings():
            logger.warning("%s", warning)
        remote = RemoteOptions(
            endpoint=endpoint,
            dialect=endpoint_dialect.value,
            reasoning_field=endpoint_reasoning,
            tokenizer=tokenizer,
            max_concurrent=endpoint_concurrency,
            patience_seconds=endpoint_patience,
            silence_seconds=endpoint_silence,
            omitted=frozenset(endpoint_omit or ()),
            max_tokens_member=endpoint_max_tokens_member,
            max_tokens=max_output_tokens or RemoteOptions.max_tokens,
            engine_args=tuple(engine_arg or ()),
            suspend_ttl_seconds=suspend_ttl,
            max_forced_string=max_forced_string,
        )
        _check_simulation(
            model,
            simulate,
            prefill=simulate_prefill,
            calls=simulate_calls,
            tool=simulate_tool,
            words=simulate_words,
        )
        of_model = {
            "device": device is not options.DeviceName.AUTO,
            "dtype": dtype is not options.DtypeName.AUTO,
            "kv-dtype": kv_dtype is not options.KVDtypeName.AUTO,
            "exact": exact,
            "no-cuda-graphs": not cuda_graphs,
        }
        of_process = {
            "threads": threads is not None,
            "kv-memory": kv_memory is not None,
            "reserve-kv": reserve_kv,
            "suspend-policy": suspend_policy is not SuspendPolicy.AUTO,
            "swap-dir": swap_dir is not None,
            "swap-limit": swap_limit is not None,
            "prefill-chunk": prefill_chunk is not None,
            "max-forced-string": max_forced_string is not None and kind_of(model) is not Kind.VLLM,
            "replay": bool(replay),
        }
        if simulate is not None:
            _refuse(of_model, "a model, not with --simulate")
        if kind_of(model) is not None:
            _refuse(of_model | of_process, f"a model of this process, not with {model}")
        # What can be known to be wrong is told before a model is loaded, which may take minutes.
        check_choice(model, remote)
        served = name_of(model) if simulate is None else simulated_name(simulate or None)
        files = read_operator_files(settings, served)
        find_classifier(settings.safety)
        check_storage(settings)
        _check_swap_dir(swap_dir)
        sockets = resources.enter_context(bound_sockets(host, port))
        if model is not None and kind_of(model):
            with _conversion_shown() as progress:
                engine = remote_engine(model, remote, progress)
        else:
            if simulate is None:
                loaded = _load(model, device, runner_options)
                torch.set_num_threads(loaded.runner.torch_threads(runner_options.threads))
            else:
                script = Script.of_calls(
                    simulate_calls or 0, simulate_tool or "tool", num_words=simulate_words or 64
                )
                loaded = _load_simulated(
                    simulate or None, simulate_prefill or None, script, runner_options
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
            _serve(engine, settings, files, sockets)
        finally:
            engine.close()


def _check_simulation(model: str | None, simulate: float | None, **others: object) -> None:
    """Make sure that nothing is chosen of a simulation where there is none, nor a model besides."""
    if simulate is not None and model is not None:
        raise SettingsError("--model does not go with --simulate, which is in the place of a model")
    for name, value in others.items():
        if simulate is None and value is not None:
            raise SettingsError(f"--simulate-{name} goes with --simulate only")


def _refuse(is_chosen: Mapping[str, bool], whose: str) -> None:
    """Make sure that none of some options is chosen, which go with something else."""
    for name, is_so in is_chosen.items():
        if is_so:
            raise SettingsError(f"--{name} goes with {whose}")


def _check_swap_dir(folder: Path | None) -> None:
    """Make sure that caches can be swapped out there: a run would only be the slower for it."""
    try:
        why = None if folder is None else obstacle_to(folder)
    except OSError as error:
        why = error.strerror
    if why:
        raise SettingsError(f"--swap-dir: cannot swap out to {folder}: {why}")


@contextmanager
def _mistakes_told() -> Iterator[None]:
    """End with one line where the operator can do something about it."""
    try:
        yield
    except _MISTAKES as error:
        raise SystemExit(f"server: {error}") from error


def _set_up_logging(log_level: options.LogLevelName) -> None:
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # It has a handler of its own besides, and would say each line twice.
    logging.getLogger("huggingface_hub").handlers.clear()
    uvicorn = logging.getLogger("uvicorn.error")
    if log_level is options.LogLevelName.DEBUG:
        uvicorn.setLevel(logging.INFO)  # or it would log headers, and with them API keys
    elif log_level is options.LogLevelName.INFO:
        uvicorn.setLevel(logging.WARNING)  # it says what we say too
    uvicorn.addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    """Whether a record is not uvicorn's error of each upgrade that was refused, and each stream
    that was given up, which are none."""
    return not record.getMessage().startswith("ASGI callable returned without completing ")


def _load(
    model: str | None, device: options.DeviceName, runner_options: RunnerOptions
) -> LoadedModel:
    with _conversion_shown() as progress:
        return load_model(model, device=device.value, options=runner_options, progress=progress)


def _load_simulated(
    decode_rate: float | None,
    prefill_rate: float | None,
    script: Script,
    runner_options: RunnerOptions,
) -> LoadedModel:
    kv_memory = runner_options.kv_memory_on(torch.device("cpu"))
    try:
        with _conversion_shown() as progress:
            return simulated_model(
                decode_rate,
                prefill_rate,
                script=script,
                kv_format=SMOLLM2_KV,
                kv_memory=kv_memory,
                progress=progress,
            )
    except ValueError as error:
        raise SettingsError(f"--kv-memory: {error}") from error


@contextmanager
def _conversion_shown() -> Iterator[Progress]:
    console = Console(stderr=True)
    with ProgressBars(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("converting the model (once)", visible=False)

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, visible=True)

        yield show


def _serve(engine: Engine, settings: Settings, files: OperatorFiles, sockets: list[socket]) -> None:
    app = create_app(engine, settings, files)
    config = server_config(app, settings, port=sockets[0].getsockname()[1])
    server = Server(config, app.state.draining, settings.drain_seconds, engine)
    server.run(sockets)
    if not server.started:
        raise SystemExit(1)  # uvicorn has said why
    logger.info("shutdown 4/4: stopping the engine")
