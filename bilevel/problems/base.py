"""A bilevel problem: oracles and a start, with exact solutions, constants and certificates if they are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import Point, PyTree, as_float
from bilevel.oracles import AutodiffOracles, DifferenceOracles, HostData, HostSamples, Oracles, Samples
from bilevel.oracles.autodiff import Loss, checked, has_convolutions, takes_key
from bilevel.oracles.host_samples import head
from bilevel.oracles.samples import NARROW
from bilevel.oracles.sharding import digest, shard, shard_own
from bilevel.problems.certificate import (
    Certifier,
    Constants,
    ConstantsRule,
    PointBounds,
    SampledBounds,
    implied,
    sample_constants,
)
from bilevel.problems.checks import (
    as_array,
    check_bounds,
    check_choice,
    check_data,
    check_flag,
    check_range,
    check_same_columns,
    check_sizes,
    check_variable,
    make_rng,
)
from bilevel.problems.exact import ExactSolver, IterativeExactSolver
from bilevel.problems.hypergradient import check_derivatives

NOT_SOLVED = "exact solutions are not computed from rows that stay on the host, which would be read hundreds of times"
Builder = TypeVar("Builder", bound=Callable[..., Any])

# Descriptions of parameters that several builders have.
_DESCRIPTIONS = {
    "groups": """groups : the group of each feature, 0, 1, …; features of a group share a penalty. By default each
        feature has its own; zeros give a single penalty for all""",
    "outer_bounds": "outer_bounds : (lower, upper) bounds of x: numbers or arrays like x; None means no bound",
    "dtype": """dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to the data""",
    "seed": "seed : seed of the shuffle of the rows",
}


def documented(builder: Builder) -> Builder:
    """Insert shared descriptions of parameters into the docstring of a builder, as ``%(name)s``."""
    builder.__doc__ = (builder.__doc__ or "") % _DESCRIPTIONS
    return builder


@dataclass(frozen=True)
class BilevelProblem:
    """min over x of F(z*(x), x), with z*(x) the minimizer of G(., x); F and G are means over samples.

    Attributes
    ----------
    oracles : derivatives of F and G
    start : the first point of runs, in the dtype of the problem
    exact_solver : a function that returns the exact solution at an outer variable, or None
    name : name in tables and plots
    metrics : additional metrics of runs, name -> function of the point; the clock stops while they are evaluated
    info : known numbers, such as ``v_radius``, a bound of ||v*(x)||
    find_constants : the function behind `constants`; None means that they are sampled
    certificate_bounds : a function of the problem that returns the `PointBounds` of certificates, or None
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
        inner_loss: Loss | None,
        outer_loss: Loss | None,
        inner_data: PyTree,
        outer_data: PyTree,
        inner_var: PyTree,
        outer_var: PyTree,
        *,
        v: PyTree | None = None,
        outer_bounds: Any = None,
        inner_batch_loss: Loss | None = None,
        outer_batch_loss: Loss | None = None,
        accumulate: int = 1,
        compute_dtype: str | None = None,
        strongly_convex: bool = False,
        second_derivatives: bool = True,
        metrics: dict[str, Callable[[Point], Any]] | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
        name: str = "custom",
    ) -> "BilevelProblem":
        """Build a problem from losses of one sample, or of a batch.

        A loss with an argument ``key`` is random, as with dropout or augmentation. It gets a different key for each row
        of each step, or for each batch, and the same keys in every evaluation of a run.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, sample) -> scalar``, in jax.numpy, of one row of the data;
            None if a loss of a batch is given
        inner_data, outer_data : pytrees of arrays, first axis = samples; integer leaves stay integers. A
            :class:`bilevel.HostData` stays on the host
        inner_var, outer_var : the start, pytrees of floats
        v : start of the auxiliary variable, like ``inner_var``; zero by default
        outer_bounds : (lower, upper) bounds of the outer variable, each None, a number, or like ``outer_var``
        inner_batch_loss, outer_batch_loss : ``loss(inner_var, outer_var, batch) -> one number per row``, instead of a
            loss of one sample. Use it for vectorized code, or if the rows of a batch depend on each other
        accumulate : number of parts of each batch, which are read one after the other. The derivatives are the same and
            need less memory
        compute_dtype : "bfloat16" lets losses compute in this dtype if runs are in float32. Variables, sums, and
            derivatives stay in float32, and everything that is computed in float64 does not change
        strongly_convex : set it to True if the inner loss is strongly convex in ``inner_var``. Runs are then evaluated
            by exact hypergradients, from Newton's method and conjugate gradients in float64
        second_derivatives : set it to False if JAX cannot differentiate the gradients of ``inner_loss``, for example
            because it calls other programs. Products are then differences of gradients, without exact solutions
        metrics : additional metrics of runs, name -> function of the point
        dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to the data
        seed : seed of the shuffle of the rows
        name : name in tables and plots
        """
        check_flag(strongly_convex=strongly_convex, second_derivatives=second_derivatives)
        if strongly_convex and not second_derivatives:
            needed = "`second_derivatives=False`: exact solutions, which `strongly_convex=True` asks for, need them"
            raise ValueError(f"{needed}; leave one of the two out.")
        if not isinstance(name, str):
            raise ValueError(f"`name={name!r}`: must be a text.")
        if compute_dtype is not None:
            check_choice("compute_dtype", compute_dtype, ("bfloat16", "float16"))
        losses = _level_losses(inner_loss, outer_loss, inner_batch_loss, outer_batch_loss)
        if strongly_convex and any(takes_key(loss) for loss, _ in losses):
            raise ValueError("`strongly_convex=True`: a loss that takes a `key` is random and has no exact solution.")
        dtype = resolve_dtype(dtype, inner_data=head(inner_data), outer_data=head(outer_data))
        if strongly_convex and any(isinstance(level, HostData) for level in (inner_data, outer_data)):
            raise ValueError(f"`strongly_convex=True`: {NOT_SOLVED}; leave it out.")
        names, given = ("inner_data", "outer_data"), (inner_data, outer_data)
        check_same_columns(names, given, reordered=True)
        data = [check_data(*level, on_host=True) for level in zip(names, given, strict=True)]
        z, x = check_variable("inner_var", inner_var, dtype), check_variable("outer_var", outer_var, dtype)
        v = jax.tree.map(np.zeros_like, z) if v is None else check_variable("v", v, dtype)
        for level, rows in zip(names, data, strict=True):
            check_range(level, rows, dtype)
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise ValueError(f"`metrics={metrics!r}`: must be a dict, name -> function of the point.")
        if jax.tree.map(np.shape, v) != jax.tree.map(np.shape, z):
            raise ValueError("`v` must have the structure and shapes of `inner_var`.")
        bounds, start, rng = check_bounds(outer_bounds, x), Point(z, x, v), make_rng(seed)
        with arithmetic(dtype):
            inner, outer = (_lay_out_for(*loss, rows, dtype, rng) for loss, rows in zip(losses, data, strict=True))
            kind = AutodiffOracles if second_derivatives else DifferenceOracles
            oracles = kind(
                *(inner, outer, bounds),
                inner_loss=losses[0][0],
                outer_loss=losses[1][0],
                inner_of_batch=losses[0][1],
                outer_of_batch=losses[1][1],
                accumulate=check_sizes(accumulate=accumulate)[0],
                compute_dtype=compute_dtype,
            )
            traced = [_check_loss(level, oracles, start) for level in ("inner", "outer")]
            oracles = replace(oracles, convolves=any(map(has_convolutions, traced)))
        problem = cls(oracles, start, name=name, metrics=metrics)
        if not strongly_convex:
            return problem
        exact_solver = IterativeExactSolver(oracles, start)
        return replace(problem, exact_solver=exact_solver, certificate_bounds=SampledBounds, is_certified=False)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which runs compute."""
        return self.oracles.inner_samples.dtype

    @property
    def n_inner(self) -> int:
        """Number of inner samples."""
        return self.oracles.n_inner

    @property
    def n_outer(self) -> int:
        """Number of outer samples."""
        return self.oracles.n_outer

    def sharded(self, devices: Sequence[jax.Device] | None = None, *, own_rows: bool = False) -> "BilevelProblem":
        """Return the same problem with each block of rows split over devices; runs differ only by rounding errors.

        Parameters
        ----------
        devices : by default all devices of JAX, including those of other processes
        own_rows : set it to True if each process has built the problem only from its own rows: process p of P from
            ``rows[p::P]``, or all processes from the same number of rows. Exact metrics are then computed on the
            devices, from all rows
        """
        if self.oracles.takes_keys:
            raise ValueError("`sharded`: losses that take a `key` run on one device; remove the argument `key`.")
        devices = jax.devices() if devices is None else devices
        if not own_rows:
            oracles = shard(self.oracles, self.start, devices)
            return replace(self, oracles=oracles, find_constants=None, certificate_bounds=None)
        oracles = shard_own(self.oracles, self.start, devices)
        solver = None if self.exact_solver is None else IterativeExactSolver(oracles, self.start)
        return BilevelProblem(oracles, self.start, solver, self.name, self.metrics, is_certified=self.is_certified)

    def check(self, *, seed: int = 0, tolerance: float | None = None, hypergradients: bool = False) -> dict[str, float]:
        """Compare derivatives with finite differences near the start, and raise ValueError if one of them is wrong.

        Parameters
        ----------
        seed : seed of the point, which is near the start, and of the direction
        tolerance : largest accepted error; by default 1e-5, and 1e-2 for losses that compute in float32 by themselves
        hypergradients : also compare the methods of `bilevel.hypergradient`, which takes some hundreds of products

        Returns
        -------
        errors : relative errors by the name of the derivative
        """
        return check_derivatives(self, seed, tolerance, hypergradients)

    def __repr__(self) -> str:
        sizes = (sum(np.size(leaf) for leaf in jax.tree.leaves(part)) for part in self.start[:2])
        numbers = "z of {:,} and x of {:,} numbers".format(*sizes)
        return f"<BilevelProblem {self.name!r}: {self.n_inner:,} + {self.n_outer:,} rows, {numbers}, {self.dtype}>"

    def constants(self, *, radius: float | None = None, box: tuple[Any, Any] | None = None, seed: int = 0) -> Constants:
        """Return the constants of ass:regul_F and ass:regul_G of this problem.

        For quadratics and the worst case they are exact everywhere, except L0_F, which is infinite, and is bounded on a
        region if ``radius`` is given. For logistic selection and data cleaning they are proved on a region. For other
        problems they are sampled in a region.

        Parameters
        ----------
        radius : radius of the ball of z. By default a ball that contains the start and all z*(x), as G(z*) <= G(0);
            for sampled problems 1 + ||z_0||
        box : (lower, upper) limits of x, numbers or like x; by default finite bounds of the problem, and otherwise the
            start plus and minus 1. Data cleaning needs no limits
        seed : seed of the samples, if the constants are sampled
        """
        if self.oracles.is_on_host:
            raise ValueError(f"`constants`: {NOT_SOLVED}; build the problem from some of the rows as arrays.")
        if self.exact_solver is None:
            raise ValueError("the inner level may not be strongly convex; if it is, build with `strongly_convex=True`.")
        radius = as_float(radius)
        if radius is not None and not (isinstance(radius, float) and 0 < radius < inf):
            raise ValueError(f"`radius={radius!r}`: must be above 0 and finite, or None.")
        found: tuple[dict[str, Any], Any, Any] = (self.find_constants or sample_constants)(self, radius, box, seed)
        values, how, region = found
        follows = implied(**{name: values[name] for name in ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")})
        worst = "estimate" if "estimate" in how.values() else "bound"
        return Constants(**follows | values, how=dict.fromkeys(follows, worst) | how, region=region)

    def certifier(self) -> Certifier:
        """Return the function that computes the certificate of a point. This may take a full-batch pass."""
        return Certifier(self)

    def fingerprint(self) -> str:
        """Return a digest of the start, and of the class and the contents of the oracles. It is computed once.

        If the rows lie on devices of several processes, all processes must make the first call.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        kind = f"{type(self.oracles).__name__}{getattr(self.oracles, 'compute_dtype', None) or ''}"
        return digest((self.oracles, self.start), kind).hex()


def _level_losses(*given: Loss | None) -> list[tuple[Loss, bool]]:
    """Return the loss of each level, and whether it takes a batch."""
    losses = []
    for level, one, batch in (("inner", given[0], given[2]), ("outer", given[1], given[3])):
        if (one is None) == (batch is None):
            got = "both" if batch is not None else "neither"
            raise ValueError(f"`{level}_loss`, `{level}_batch_loss`: give one of the two, got {got}.")
        losses.append((one, False) if batch is None else (batch, True))
    return losses  # type: ignore[return-value]


def _lay_out_for(loss: Loss, of_batch: bool, rows: PyTree, dtype: np.dtype, rng: np.random.Generator) -> Samples:
    """Return the samples of a level: rows first for a loss of a batch, and with keys for a loss that takes them."""
    samples = lay_out_rows(rows, dtype, rng, 0 if of_batch else NARROW)
    return replace(samples, key_words=jnp.zeros(2, jnp.uint32)) if takes_key(loss) else samples


def _check_loss(level: str, oracles: AutodiffOracles, start: Point) -> Any:
    """Return the traced derivatives; raise ValueError for a loss that fails on one sample or has no derivatives."""
    loss, samples, of_batch = oracles.level(level)
    name = f"{level}_batch_loss" if of_batch else f"{level}_loss"
    if of_batch:
        jax.eval_shape(oracles.inner_value if level == "inner" else oracles.outer_value, start)
    else:
        jax.eval_shape(checked(name, loss), start.inner_var, start.outer_var, samples.one())
    try:
        traced = jax.make_jaxpr(oracles.inner if level == "inner" else oracles.outer)(start)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        way = " If only its gradients exist, say `second_derivatives=False`." if level == "inner" else ""
        raise ValueError(f"`{name}`: JAX cannot take its derivatives over many samples: {reason}{way}") from error
    if any(isinstance(constant, jax.core.Tracer) for constant in traced.consts):
        raise ValueError(f"`{name}` uses an array that JAX traced in an earlier call; compute it again in each call.")
    return traced


def lay_out_rows(data: PyTree, dtype: np.dtype, rng: np.random.Generator, narrow: int) -> Samples:
    """Return the samples of a level, on the device or, for a `HostData`, on the host."""
    return (HostSamples.from_data if isinstance(data, HostData) else Samples.from_rows)(data, dtype, rng, narrow)


def lay_out(
    data: tuple[PyTree, PyTree],
    starts: tuple[Any, Any],
    defaults: tuple[np.ndarray, np.ndarray],
    outer_bounds: Any,
    dtype: np.dtype,
    rng: np.random.Generator,
    narrow: int = NARROW,
    names: tuple[str, str] = ("X_train", "X_val"),
) -> tuple[dict[str, Any], Point]:
    """Return the arguments that all oracles classes take, and the start of a run.

    Parameters
    ----------
    data : the checked rows of both levels; the levels share samples if they are the same object
    starts, defaults : z and x, or None for the default; a default also determines the shape
    outer_bounds : (lower, upper) bounds of x, each None, a number or an array like x
    dtype : the dtype in which runs compute
    rng : generator that shuffles the rows
    narrow : rows of at most this many numbers are laid out with the samples last
    names : names of the data in error messages
    """
    variables = []
    for name, given, default in zip(("inner_var", "outer_var"), starts, defaults, strict=True):
        variables.append(check_variable(name, default if given is None else as_array(name, given), dtype))
        if np.shape(variables[-1]) != default.shape:
            raise ValueError(f"`{name}` has shape {np.shape(variables[-1])}; this problem needs {default.shape}.")
    z, x = variables
    bounds = check_bounds(outer_bounds, x)
    for name, level in zip(names, data, strict=True):
        check_range(name, level, dtype)
    with arithmetic(dtype):
        inner = lay_out_rows(data[0], dtype, rng, narrow)
        outer = inner if data[1] is data[0] else lay_out_rows(data[1], dtype, rng, narrow)
    return {"inner_samples": inner, "outer_samples": outer, "outer_bounds": bounds}, Point(z, x, np.zeros_like(z))
