"""What the operator names, read before there is a model to serve: that may take minutes to load."""

from sampler.traces import Trace, read_traces
from server.access import ApiKeys
from server.model_routes import ModelRoutes
from server.prices import PriceError, parse_prices
from server.safety import find_classifier
from server.settings import Settings, SettingsError


def check_files(settings: Settings) -> None:
    """Make sure that the server will be able to use what ``settings`` name, whatever the model.

    Raises:
        ApiKeyFileError: the API keys cannot be read.
        SafetyError: there is no such classifier.
        SettingsError: a file of traces cannot be read.
        TraceError: it does not hold traces.
    """
    for path in (settings.models_file, settings.api_key_file, *settings.replay_files):
        if path is not None and path.exists() and not path.is_file():
            # It is read again when there is a model: of a pipe nothing would be left.
            raise SettingsError(f"cannot read {path}: it is no file")
    if settings.api_key_file is not None:
        ApiKeys.from_file(settings.api_key_file)
    find_classifier(settings.safety)
    replay_traces(settings)


def check_models_file(settings: Settings, served: str) -> None:
    """Make sure that the file of models can be used where the model ``served`` is.

    Raises:
        ModelRoutesError: it cannot be read, or makes no sense.
        PriceError: one of the prices in it is none.
    """
    path = settings.models_file
    if path is None:
        return
    try:
        parse_prices(ModelRoutes.from_file(path, [served]).price_table)
    except PriceError as error:
        raise PriceError(f"{path}: {error}") from error


def replay_traces(settings: Settings) -> list[Trace]:
    """Return the traces that requests may have replayed.

    Raises:
        SettingsError: a file cannot be read.
        TraceError: it does not hold traces.
    """
    traces = list[Trace]()
    for path in settings.replay_files:
        try:
            traces += read_traces(path)
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    return traces
