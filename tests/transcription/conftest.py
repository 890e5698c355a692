"""The problems on which every transcription is tested."""

import pytest

from tests.transcription.draws import make_logistic, make_quadratic

from .problems import Problem


@pytest.fixture(params=[make_quadratic, make_logistic], ids=["quadratic", "logistic"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return request.param()
