import pytest

from tests.theory.enumeration import Scalars, mild


@pytest.fixture(scope="module")
def mild_case():
    problem = mild(outer_scale=0.3)
    return problem, Scalars(problem), problem.constants()
