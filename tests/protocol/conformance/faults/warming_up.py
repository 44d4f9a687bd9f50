"""Faults in warm-ups."""

from protocol.conformance.rules import Rule
from protocol.conformance.shapes import Event
from tests.protocol.conformance.faults.fault import Faults
from tests.protocol.conformance.model_server import Connection, Lane, ModelServer, Run

faults = Faults()


@faults.doing(Rule.WARM_UP, "warm-up-is-context")
class WarmsUpForNothing(ModelServer):
    """What a warm-up was told is forgotten."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if not run.params.generate:
            run.context = []
        return run


@faults.doing(Rule.STORE_FALSE_IS_LOCAL, "warm-up-is-local")
class WarmsUpForAll(ModelServer):
    """Warm-ups are known on every connection."""

    def begin(
        self, body: Event, connection: Connection | None = None, lane: Lane | None = None
    ) -> Run:
        run = super().begin(body, connection, lane)
        if not run.params.generate:
            self.stored[run.id] = run
        return run
