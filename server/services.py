"""What every connection and request of one server shares."""

from protocol.dialect import Dialect
from sampler.engine import Engine
from server.post_inference import PostInference
from server.pre_inference import PreInference, PreparedRun
from server.responder import Responder
from server.settings import Settings
from server.telemetry import Telemetry


class Services:
    """An engine with the work before and after it."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.telemetry = Telemetry(engine)
        self.pre_inference = PreInference(engine, settings, self.telemetry)
        self.post_inference = PostInference(self.telemetry)

    def responder(self, prepared: PreparedRun, dialect: Dialect) -> Responder:
        """Return who speaks for ``prepared``."""
        return Responder(prepared, dialect, self.engine, self.post_inference, self.telemetry)
