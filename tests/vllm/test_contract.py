"""What the adapter and its fake take for granted is so in the real vLLM."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.sampler.engines.vllm_contract import CLAIMS, FATALITIES, Claim, Engine
from tests.vllm.real_engine import real_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with real_engine() as engine:
        yield engine


@pytest.mark.parametrize("claim", CLAIMS)
async def test_contract(engine: Engine, claim: Claim) -> None:
    await claim(engine)


@pytest.mark.parametrize("claim", FATALITIES)
async def test_fatality(claim: Claim) -> None:
    async with real_engine() as engine:
        await claim(engine)
