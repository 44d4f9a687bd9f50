"""The models, each loaded once for the tests of a module."""

import pytest

from tests.equivalence import models
from tests.equivalence.models import Subject


@pytest.fixture(scope="module")
def tiny_model() -> Subject:
    return models.tiny_model()


@pytest.fixture(scope="module")
def embedded_model() -> Subject:
    return models.embedded_model()
