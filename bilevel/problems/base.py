"""A bilevel problem: oracles, a start, and what is known of it: exact solutions, constants, certificate bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import arithmetic, resolve_dtype
from bilevel._types import Point, PyTree
from bilevel.oracles import AutodiffOracles, Oracles, Samples
from bilevel.oracles.autodiff import Loss
from bilevel.oracles.samples import NARROW
from bilevel.oracles.sharding import digest, shard, shard_own
from bilevel.problems.certificate import Certifier, PointBounds
from bilevel.problems.checks import check_bounds, check_data, check_derivatives, check_range, check_variable, make_rng
from bilevel.problems.constants import Constants, ConstantsRule, SampledBounds, implied, sample_constants
from bilevel.problems.exact import ExactSolver, IterativeExactSolver


@dataclass(frozen=True)
class BilevelProblem:
    """min over x of F(z*(x), x), with z*(x) the minimizer of G(., x); F and G are means over samples.

    Attributes
    ----------
    oracles : derivatives of F and G
    start : where runs begin, in the problem's dtype
    exact_solver : gives the exact solution at an outer variable, or None where there is none
    name : for tables and plots
    metrics : more numbers to follow, name -> function of the point, evaluated off the clock
    info : numbers known of the problem, such as ``v_radius``, a bound of ||v*(x)||
    find_constants : how `constants` finds them; by sampling where it is None
    certificate_bounds : what a certificate is computed from, made from the problem; None where there is none
    is_certified : whether those bounds are proved
    """

    oracles: Oracles
    start: Point
    exact_solver: ExactSolver | None = None
    name: str = "problem"
    metrics: Mapping[str, Callable[[Point], Any]] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    find_constants: ConstantsRule | None = None
    certificate_bounds: "Callable[[BilevelProblem], PointBounds] | None" = None
    is_certified: bool = True

    @classmethod
    def from_losses(
        cls,
        inner_loss: Loss,
        outer_loss: Loss,
        inner_data: PyTree,
        outer_data: PyTree,
        inner_var: PyTree,
        outer_var: PyTree,
        *,
        v: PyTree | None = None,
        outer_bounds: Any = None,
        strongly_convex: bool = False,
        metrics: dict[str, Callable[[Point], Any]] | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
        name: str = "custom",
    ) -> "BilevelProblem":
        """Build a problem from losses of one sample.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, sample) -> scalar``, in jax.numpy, of one row of the data
        inner_data, outer_data : pytrees of arrays, first axis = samples; integer leaves stay integers
        inner_var, outer_var : the start, pytrees of floats
        v : start of the auxiliary variable, like ``inner_var``; zero by default
        outer_bounds : (lower, upper), each None, a number, or like ``outer_var``
        strongly_convex : say True when the inner loss is so in ``inner_var``: runs are then evaluated by exact
            hypergradients, computed by Newton's method and conjugate gradients in float64
        metrics : more numbers to follow, name -> function of the point
        dtype : "float32" or "float64", what runs compute in; by default what JAX makes of the data
        seed : of the one shuffle of the rows
        name : for tables and plots
        """
        dtype = resolve_dtype(dtype, inner_data, outer_data)
        data = check_data("inner_data", inner_data), check_data("outer_data", outer_data)
        z, x = check_variable("inner_var", inner_var, dtype), check_variable("outer_var", outer_var, dtype)
        v = jax.tree.map(np.zeros_like, z) if v is None else check_variable("v", v, dtype)
        for level, rows in zip(("inner_data", "outer_data"), data, strict=True):
            check_range(level, rows, dtype)
        if not isinstance(metrics or {}, Mapping) or not all(map(callable, (metrics or {}).values())):
            raise ValueError(f"`metrics={metrics!r}`: must be a dict, name -> function of the point.")
        if jax.tree.map(np.shape, v) != jax.tree.map(np.shape, z):
            raise ValueError("`v` must have the structure and shapes of `inner_var`.")
        bounds, start, rng = check_bounds(outer_bounds, x), Point(z, x, v), make_rng(seed)
        with arithmetic(dtype):
            inner, outer = (Samples.from_rows(level, dtype, rng) for level in data)
            _check_loss("inner_loss", inner_loss, start, inner)
            _check_loss("outer_loss", outer_loss, start, outer)
        oracles = AutodiffOracles(inner, outer, outer_bounds=bounds, inner_loss=inner_loss, outer_loss=outer_loss)
        problem = cls(oracles, start, name=name, metrics=metrics or {})
        if not strongly_convex:
            return problem
        exact_solver = IterativeExactSolver(oracles, start)
        return replace(problem, exact_solver=exact_solver, certificate_bounds=SampledBounds, is_certified=False)

    @property
    def dtype(self) -> np.dtype:
        """What runs compute in."""
        return self.oracles.inner_samples.dtype

    @property
    def n_inner(self) -> int:
        return self.oracles.n_inner

    @property
    def n_outer(self) -> int:
        return self.oracles.n_outer

    def sharded(self, devices: Sequence[jax.Device] | None = None, *, own_rows: bool = False) -> "BilevelProblem":
        """Return the same problem, each block of its rows split over devices; runs differ by rounding alone.

        Parameters
        ----------
        devices : all that JAX sees by default, those of other processes too
        own_rows : say True when each process has built the problem from its own rows alone, process p of P from
            ``rows[p::P]``, or from as many as any other: exact metrics are then computed on the devices, from all rows
        """
        devices = jax.devices() if devices is None else devices
        if not own_rows:
            return replace(self, oracles=shard(self.oracles, devices), find_constants=None, certificate_bounds=None)
        oracles = shard_own(self.oracles, self.start, devices)
        solver = None if self.exact_solver is None else IterativeExactSolver(oracles, self.start)
        return BilevelProblem(oracles, self.start, solver, self.name, self.metrics, is_certified=self.is_certified)

    def check(self, *, seed: int = 0) -> dict[str, float]:
        """Return the relative errors of derivatives against finite differences near the start; refuse a wrong one."""
        return check_derivatives(self.oracles, self.start, seed)

    def constants(self, *, radius: float | None = None, box: tuple[Any, Any] | None = None, seed: int = 0) -> Constants:
        """Return the constants of ass:regul_F and ass:regul_G of this problem.

        Quadratics and the worst case: exact everywhere; L0_F, which is infinite, is bounded on a region where
        ``radius`` is given. Logistic selection and data cleaning: proved on a region. Others: sampled in a region.

        Parameters
        ----------
        radius : of the ball of z. By default one that z*(x) cannot leave, as G(z*) <= G(0), and that holds the start;
            for sampled problems 1 + ||z_0||
        box : (lower, upper) for x, numbers or like x; by default the bounds of the problem where they are finite, else
            1 around the start. Data cleaning needs none
        seed : of the samples, where the constants are sampled
        """
        if self.exact_solver is None:
            raise ValueError("the inner level may not be strongly convex; if it is, build with `strongly_convex=True`.")
        if radius is not None and not 0 < radius < inf:
            raise ValueError(f"`radius={radius!r}`: must be above 0 and finite, or None.")
        found: tuple[dict[str, Any], Any, Any] = (self.find_constants or sample_constants)(self, radius, box, seed)
        values, how, region = found
        follows = implied(**{name: values[name] for name in ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")})
        worst = "estimate" if "estimate" in how.values() else "bound"
        return Constants(**follows | values, how=dict.fromkeys(follows, worst) | how, region=region)

    def certifier(self) -> Certifier:
        """Return the function from a point to its certificate; making it may take a pass over all rows."""
        return Certifier(self)

    def fingerprint(self) -> str:
        """Return a digest of the start, the kind of oracles and all that they hold."""
        return digest((self.oracles, self.start), type(self.oracles).__name__).hex()


def _check_loss(name: str, loss: Loss, start: Point, samples: Samples) -> None:
    arguments = start.inner_var, start.outer_var, samples.one()
    try:
        leaves = jax.tree.leaves(jax.eval_shape(loss, *arguments))
    except Exception as error:
        shapes = jax.tree.map(np.shape, arguments)
        raise ValueError(f"`{name}` failed on one sample; its arguments have shapes {shapes}: {error}") from error
    if len(leaves) != 1 or leaves[0].shape != () or leaves[0].dtype.kind != "f":
        got = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        raise ValueError(f"`{name}` must return one real scalar for one sample, got {got}; sum or average it.")


def lay_out(
    data: tuple[PyTree, PyTree],
    starts: tuple[Any, Any],
    defaults: tuple[np.ndarray, np.ndarray],
    outer_bounds: Any,
    dtype: np.dtype,
    rng: np.random.Generator,
    narrow: int = NARROW,
) -> tuple[dict[str, Any], Point]:
    """Return what every oracles class takes, from the checked rows of both levels, and the start of a run.

    A default of z or x stands for None and says what shape is due. Rows of at most ``narrow`` numbers are laid out with
    the samples last. Other parameters as for `BilevelProblem.from_losses`; ``rng`` shuffles the rows.
    """
    variables = []
    for name, given, default in zip(("inner_var", "outer_var"), starts, defaults, strict=True):
        variables.append(check_variable(name, default if given is None else given, dtype))
        if np.shape(variables[-1]) != default.shape:
            raise ValueError(f"`{name}` has shape {np.shape(variables[-1])}; this problem needs {default.shape}.")
    z, x = variables
    bounds = check_bounds(outer_bounds, x)
    for name, level in zip(("X_train", "X_val"), data, strict=True):
        check_range(name, level, dtype)
    with arithmetic(dtype):
        inner, outer = (Samples.from_rows(level, dtype, rng, narrow) for level in data)
    return {"inner_samples": inner, "outer_samples": outer, "outer_bounds": bounds}, Point(z, x, np.zeros_like(z))
