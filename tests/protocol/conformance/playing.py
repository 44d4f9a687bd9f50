"""Checks played against the model server, without sockets."""

from protocol.conformance.check import Check, Target
from protocol.conformance.play import Branch, Branches, Play, Verdict
from tests.protocol.conformance.model_server import ModelServer

TARGET = Target(model="made-up", has_api_key=True)


def played(check: Check, server: ModelServer | None = None) -> Verdict:
    """Play ``check`` to its end against ``server``, or a correct one."""
    play = Play(check, TARGET)
    _play(play, server or ModelServer())
    return play.verdict


def _play(branch: Branch, server: ModelServer) -> None:
    while (asked := branch.asked) is not None:
        if isinstance(asked, Branches):
            _play_by_turns(list(asked.branches), server)
            branch.give(None)
        else:
            branch.give(server.perform(asked))


def _play_by_turns(branches: list[Branch], server: ModelServer) -> None:
    while branches:
        for branch in list(branches):
            asked = branch.asked
            if asked is None:
                branches.remove(branch)
            else:
                assert not isinstance(asked, Branches), "branches do not branch"
                branch.give(server.perform(asked))
