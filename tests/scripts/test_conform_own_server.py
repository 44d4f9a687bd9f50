"""Our own server passes every check that it is put to."""

from pathlib import Path

import pytest

from protocol.conformance.catalogue import CHECKS
from protocol.conformance.check import Target
from protocol.conformance.play import Result
from protocol.items import FunctionCall
from sampler.conversation import call_text
from sampler.engines.simulated.model import simulated_model
from sampler.engines.simulated.script import Script, ScriptedTurn
from sampler.local_engine import LocalEngine
from scripts.conformance.address import address_of
from scripts.conformance.suite import Suite
from server.access import add_api_key
from server.settings import Settings
from tests.scripts.test_conform_suite import Watching
from tests.server.running import serving

NOT_HERE = {"http/image-input", "http/broken-image-is-refused"}
CITIES = ('{"city": "Oslo"}', '{"city": "Rome"}')
CALLS = "\n".join(call_text(FunctionCall("", "get_weather", city)) for city in CITIES)
"""Two calls at once, where the turn may make them."""


@pytest.mark.slow
async def test_our_server_passes_every_check(tmp_path: Path) -> None:
    script = Script((ScriptedTurn(0, CALLS), ScriptedTurn(num_words=24)))
    # Or so fast a model would have said all before anybody can steer it.
    engine = LocalEngine(simulated_model(script=script, kv_memory=1 << 26), window=8)
    keys = tmp_path / "keys"
    key = add_api_key(keys, "conformance")
    target = Target(engine.name, has_api_key=True)
    watching = Watching()
    async with serving(engine=engine, settings=Settings(api_key_file=keys)) as server:
        suite = Suite(address_of(server.url, key), target, watching, jobs=4, patience_seconds=120)
        await suite.play(CHECKS)

    verdicts = [played.verdict for played in watching.played]
    failed = [v for v in verdicts if v.result in (Result.FAILED, Result.ERROR)]
    assert not failed, failed[0]
    missing = {v.check.name for v in verdicts if v.result is Result.NOT_SUPPORTED}
    assert missing == NOT_HERE
    assert len(verdicts) == len(CHECKS)
