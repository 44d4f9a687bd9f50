"""The work after inference. Once per run, however it ended."""

import logging
import time

from sampler.run import Run
from server.telemetry import Telemetry

logger = logging.getLogger(__name__)


class PostInference:
    """Accounts for runs that are over."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def finish(self, run: Run) -> float:
        """Do the work and return the seconds it took."""
        started_at = time.monotonic()
        self._telemetry.post_inference.inc()
        logger.info(
            "run %s: %s after %d segments, %d tokens, %d sampled, %d forwarded again",
            run.id,
            run.state.value,
            len(run.segments),
            len(run.tokens),
            sum(segment.output_tokens for segment in run.segments),
            run.tokens_reforwarded,
        )
        return time.monotonic() - started_at
