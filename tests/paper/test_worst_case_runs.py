"""The worst case: chains, runs of solvers against the bound, bad arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bilevel
from bilevel._core.compilation import arithmetic
from paper.worst_case import chain, worst_case
from tests import cases
from tests.paper.test_worst_case import BATCH, BOTH, ROTATIONS, M, basis_of, small


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gradient_reaches_one_coordinate_further_of_its_own_chain_alone(dtype):
    problem = small(dtype=dtype)
    length = problem.info["T"] + 1
    rng = np.random.default_rng(0)
    with arithmetic(dtype):
        oracles = problem.oracles.with_batches(1, "iid")
        for reached in (0, 1, 6, length - 1):
            z = np.zeros((M, length), dtype)
            z[:, :reached] = rng.standard_normal((M, reached))
            point = problem.start._replace(inner_var=z.ravel())
            for j in range(M):
                grad = np.asarray(oracles.outer_grad(point, jnp.array([j], jnp.int32))).reshape(M, length)
                assert np.count_nonzero(grad[np.arange(M) != j]) == 0
                assert np.all(grad[j, : reached + 1] != 0) and np.all(grad[j, reached + 1 :] == 0)


@BOTH
def test_h_is_not_stationary_while_half_of_the_chains_end_in_zeros(normalization):
    problem = small(4, 7e-7, normalization=normalization)
    width, length = problem.info["beta"], problem.info["T"] + 1
    rng = np.random.default_rng(0)

    def norm_sq(half):
        y = np.ones((4, length))  # the other half is solved
        y[:2, :-2], y[:2, -2:] = half, 0
        return np.sum(problem.exact_solver(width * y.ravel()).hypergrad ** 2)

    slopes = np.linspace(1, 0, length - 2)
    smooth = [slopes**power for power in np.geomspace(0.05, 5, 30)]
    rough = [scale * rng.standard_normal((2, length - 2)) for scale in np.geomspace(1e-3, 10, 30)]
    assert min(map(norm_sq, smooth + rough)) > problem.info["epsilon"]


def test_no_chain_that_ends_in_two_zeros_has_a_small_gradient():
    """The hardest point of the last test, sought by descent on ||∇f||²; the proof claims α^1.5 / 16."""
    alpha, length = 1 / 180, 14

    @jax.jit
    @jax.value_and_grad
    def norm_sq(y):
        gradient = jax.grad(lambda y: chain(y, alpha))(jnp.concatenate([y, jnp.zeros(2)]))
        return jnp.sum(gradient**2)

    with arithmetic("float64"):
        starts = [np.linspace(1, 0, length - 1) ** power for power in (0.1, 0.3, 1.0, 3.0)]
        found = [minimize(norm_sq, y, jac=True, method="L-BFGS-B", options={"maxiter": 500}).fun for y in starts]
    assert min(found) > alpha**1.5 / 16


@ROTATIONS
def test_chains_are_orthonormal(rotation):
    basis = basis_of(small(rotation=rotation)).reshape(-1, small().start.v.size)
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-13)


def test_random_bases_follow_the_seed():
    first, again, other = (small(rotation="random", seed=seed) for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert small(seed=3).fingerprint() == small(seed=4).fingerprint(), "nothing is drawn for coordinates"


@pytest.mark.slow
def test_a_rotation_turns_the_iterates_and_leaves_the_curve():
    solver = bilevel.SRBA(0.5, 0.5, BATCH)
    plain, turned = (bilevel.run(small(rotation=r), solver, max_steps=60) for r in ("coordinates", "random"))
    basis = basis_of(turned.problem).reshape(plain.point.v.size, -1)
    cases.assert_trees_close(plain.point, jax.tree.map(lambda leaf: basis @ leaf, turned.point), atol=1e-11)
    np.testing.assert_allclose(plain.history["value"], turned.history["value"], rtol=1e-9)


# Calls of 50 steps on 8 inner and 4 outer rows, in batches of 4: SRBA makes a full-batch pass each 5 steps.
RUNS = {
    "SOBA": (bilevel.SOBA(0.1, 10.0, 4), (50 * 4, 50 * 4)),
    "SABA": (bilevel.SABA(0.1, 10.0, 4), (50 * 4, 50 * 4)),
    "SRBA": (bilevel.SRBA(0.1, 10.0, 4, period=5), (10 * 8 + 40 * 2 * 4, 10 * 4 + 40 * 2 * 4)),
}


@pytest.mark.parametrize("name", RUNS)
@ROTATIONS
@pytest.mark.slow
def test_solvers_run_and_are_charged_for_the_rows_they_read(name, rotation):
    solver, (inner, outer) = RUNS[name]
    problem = small(4, 7e-7, n_inner=8, rotation=rotation, dtype="float32")
    result = bilevel.run(problem, solver, max_steps=50)
    assert result.status == "out_of_budget"
    calls = result.calls._asdict()
    assert {calls[kind] for kind in ("inner_grad", "hvp", "cross")} == {inner}
    assert {calls[kind] for kind in ("outer_grad", "outer_grad_outer")} == {outer}
    assert result.history["value_gap"][-1] < result.history["value_gap"][0]


@BOTH
@pytest.mark.parametrize("name", ["SRBA", "SABA", "SOBA"])
@pytest.mark.slow
def test_no_solver_beats_the_bound(name, normalization):
    problem = small(4, 7e-7, normalization=normalization, inner_curvature=1.0)
    bound = problem.info["query_bound"]
    solver = getattr(bilevel, name)(0.5, 0.5, 1)
    history = bilevel.run(problem, solver, max_steps=400, eval_every=1).history
    early = history["calls_outer_grad"] <= bound
    assert np.count_nonzero(early) > 2
    assert np.all(history["hypergrad_norm_sq"][early] > problem.info["epsilon"])


def test_defaults_make_as_many_inner_rows_as_outer_ones():
    problem = worst_case(3, 5e-7, dtype="float32")
    assert (problem.n_inner, problem.n_outer) == (3, 3)
    assert problem.dtype == np.float32
    assert problem.name == "worst_case (individual)"
    assert all(not part.any() and part.size == 3 * (problem.info["T"] + 1) for part in problem.start)
    assert problem.oracles.largest_curvature == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_outer": 0}, "`n_outer=0`: must be an integer of at least 1"),
        ({"n_outer": 2.5}, "`n_outer=2.5`: must be an integer"),
        ({"n_inner": -1}, "`n_inner=-1`: must be an integer"),
        ({"epsilon": 0.0}, "`epsilon=0.0`: must be above 0"),
        ({"epsilon": np.nan}, "`epsilon=nan`: must be a finite number"),
        ({"epsilon": 1e-3}, "`epsilon=0.001` leaves chains of T = 0 < 14; take `epsilon` <= 6.047e-07"),
        ({"epsilon": 1e-15}, "`epsilon=1e-15` needs more than 2147483647 coordinates"),
        ({"smoothness": -1.0}, "`smoothness=-1.0`: must be above 0"),
        ({"gap": np.inf}, "`gap=inf`: must be a finite number"),
        ({"inner_curvature": 0}, "`inner_curvature=0`: must be above 0"),
        ({"normalization": "paper"}, "`normalization='paper'`: must be one of 'individual', 'mean_squared'"),
        ({"rotation": "none"}, "`rotation='none'`: must be one of 'coordinates', 'random'"),
        ({"dtype": "int32"}, "dtype='int32'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        worst_case(**({"n_outer": 5, "epsilon": 5e-7} | changes))
