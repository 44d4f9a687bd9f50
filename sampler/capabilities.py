"""What can be relied on, with one back-end or another."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Capabilities:
    """What an engine does for a run that is suspended, and for one that is sampled.

    Nothing is claimed that depends on somebody else's good will: an endpoint's prefix cache may
    well have kept what a run needs, but nobody has promised it.
    """

    keeps_kv: bool
    """Whether the keys and values of a suspended run are its own until it resumes or its time is
    over, so that to resume reads the pending token and the suffix only."""
    token_exact: bool
    """Whether what was sampled stays in the context as the tokens it was. If not, a conversation is
    sent as text, and encoded anew each time by somebody else."""
    drops_pending_token: bool
    """Whether the back-end forgets the last token that it sampled, so that it has to be read
    again with the suffix."""
    grammar: bool
    """Whether calls and JSON are constrained while they are sampled, by us. If not, a request for
    it is refused, or passed on to somebody else, and what comes back may be anything."""

    def as_json(self) -> dict[str, bool]:
        """Return them by their names."""
        return asdict(self)
