"""``python -m server``: load a model, serve it, and go down in named phases."""

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import torch
import typer
import uvicorn
from rich.console import Console
from rich.progress import Progress

from sampler.embedded_model import EmbeddedModelError
from sampler.engine import Engine
from sampler.model_loading import LoadedModel, ModelLoadError, load_model
from server.app import create_app
from server.settings import Settings

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


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def main(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    model: Annotated[
        str | None,
        typer.Option(help="A local path or Hugging Face id.", show_default="the embedded model"),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.AUTO,
    dtype: Annotated[
        Dtype, typer.Option(help="auto: bfloat16 on CUDA, float32 elsewhere.")
    ] = Dtype.AUTO,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the model.", show_default="torch's")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of requests that bring none.", show_default="drawn for each"),
    ] = None,
    max_forced_string: Annotated[
        int,
        typer.Option(
            min=0, help="Bound on strings of forced calls whose schema sets none; 0 is no bound."
        ),
    ] = 64,
    log_level: Annotated[LogLevel, typer.Option(help="Least level to log.")] = LogLevel.INFO,
) -> None:
    """Serve a local model by the Responses API, with a sampler that suspends at tool calls."""
    _set_up_logging(log_level)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, until the server takes it over
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        loaded = _load(model, device, dtype)
    except (ModelLoadError, EmbeddedModelError) as error:
        raise SystemExit(f"server: {error}") from error
    _serve(Engine(loaded, max_forced_string=max_forced_string), Settings(seed=seed), host, port)


def _set_up_logging(log_level: LogLevel) -> None:
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if log_level is LogLevel.INFO:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it says what we say too


def _serve(engine: Engine, settings: Settings, host: str, port: int) -> None:
    config = uvicorn.Config(
        create_app(engine, settings),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        # Frames are measured by the application, which answers with an error; this one only bounds
        # memory, since going over it closes the socket.
        ws_max_size=2 * settings.max_frame_bytes,
        ws_per_message_deflate=False,
        # Some clients answer no pings while they run a tool: ping, but do not insist.
        ws_ping_timeout=None,
        timeout_graceful_shutdown=5,
    )
    server = Server(config)
    server.run()
    logger.info("shutdown 3/3: stopping the model thread")
    engine.close()
    if not server.started:
        raise SystemExit(1)


def _load(model: str | None, device: Device, dtype: Dtype) -> LoadedModel:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("converting the model (once)", visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        return load_model(model, device=device.value, dtype=dtype.value, progress=show)


class Server(uvicorn.Server):
    """uvicorn, with our word when it can serve and a quiet end on SIGINT and SIGTERM."""

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind, then say where."""
        await super().startup()
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}", flush=True)  # noqa: T201

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Stop accepting, close what is open, wait for it."""
        logger.info(
            "shutdown 1/3: closing the port and %d connections", len(self.server_state.connections)
        )
        await super().shutdown()
        if (tasks := self.server_state.tasks) and not self.force_exit:
            await asyncio.wait(tasks)  # uvicorn cancelled them, and each ends its step in flight
        logger.info("shutdown 2/3: connections closed, their runs freed")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM as wishes to end well: uvicorn would raise them again at the
        end, and the process would die of them after all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


if __name__ == "__main__":
    typer.run(main)
