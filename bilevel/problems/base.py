"""A bilevel problem: oracles, a start, and what is known of it: exact solutions, constants, certificate bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import arithmetic, resolve_dtype
from bilevel._types import Point, PyTree, as_float
from bilevel.oracles import AutodiffOracles, DifferenceOracles, HostData, HostSamples, Oracles, Samples
from bilevel.oracles.autodiff import Loss, checked, has_convolutions, takes_key
from bilevel.oracles.host_samples import head
from bilevel.oracles.samples import NARROW
from bilevel.oracles.sharding import digest, shard, shard_own
from bilevel.problems.certificate import Certifier, PointBounds
from bilevel.problems.checks import (
    as_array,
    check_bounds,
    check_choice,
    check_data,
    check_positive,
    check_range,
    check_same_columns,
    check_sizes,
    check_variable,
    make_rng,
)
from bilevel.problems.constants import Constants, ConstantsRule, SampledBounds, implied, sample_constants
from bilevel.problems.derivatives import check_derivatives, default_tolerance, refuse_large
from bilevel.problems.exact import ExactSolver, IterativeExactSolver
from bilevel.problems.hypergradients import compare

NOT_SOLVED = "nothing is solved exactly from rows that stay on the host, which would be read hundreds of times"


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

        A loss with an argument ``key`` is random, as by dropout or augmentation: it gets a key of its own for each row
        of each step, or for each batch, and one that stays the same where a run is evaluated.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, sample) -> scalar``, in jax.numpy, of one row of the data;
            None where a loss of a batch is given
        inner_data, outer_data : pytrees of arrays, first axis = samples; integer leaves stay integers. A
            :class:`bilevel.HostData` stays on the host
        inner_var, outer_var : the start, pytrees of floats
        v : start of the auxiliary variable, like ``inner_var``; zero by default
        outer_bounds : (lower, upper), each None, a number, or like ``outer_var``
        inner_batch_loss, outer_batch_loss : ``loss(inner_var, outer_var, batch) -> one number per row``, in the place
            of the loss of one sample: for code that is vectorized, or mixes the rows of a batch
        accumulate : read each batch in so many parts, one after the other: the same derivatives in less memory
        compute_dtype : "bfloat16" has losses compute in it where runs are in float32; variables, sums, derivatives and
            whatever is computed in float64 stay as they are
        strongly_convex : say True when the inner loss is so in ``inner_var``: runs are then evaluated by exact
            hypergradients, computed by Newton's method and conjugate gradients in float64
        second_derivatives : say False when JAX cannot differentiate the gradients of ``inner_loss``, as of one that
            calls other programs: products are then differences of gradients, and nothing is solved exactly
        metrics : more numbers to follow, name -> function of the point
        dtype : "float32" or "float64", what runs compute in; by default what JAX makes of the data
        seed : of the one shuffle of the rows
        name : for tables and plots
        """
        for flag, value in (("strongly_convex", strongly_convex), ("second_derivatives", second_derivatives)):
            if not isinstance(value, bool):
                raise ValueError(f"`{flag}={value!r}`: must be True or False.")
        if strongly_convex and not second_derivatives:
            told = "`second_derivatives=False`: exact solutions, which `strongly_convex=True` asks for, need them"
            raise ValueError(f"{told}; leave one of the two out.")
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
        check_same_columns(("inner_data", "outer_data"), (inner_data, outer_data), reordered=True)
        data = tuple(
            check_data(*level, on_host=True) for level in (("inner_data", inner_data), ("outer_data", outer_data))
        )
        z, x = check_variable("inner_var", inner_var, dtype), check_variable("outer_var", outer_var, dtype)
        v = jax.tree.map(np.zeros_like, z) if v is None else check_variable("v", v, dtype)
        for level, rows in zip(("inner_data", "outer_data"), data, strict=True):
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
            (inner_loss, of_inner), (outer_loss, of_outer) = losses
            oracles = kind(
                *(inner, outer, bounds),
                inner_loss=inner_loss,
                outer_loss=outer_loss,
                inner_of_batch=of_inner,
                outer_of_batch=of_outer,
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
        if self.oracles.takes_keys:
            raise ValueError("`sharded`: losses that take a `key` run on one device; leave it out of them.")
        devices = jax.devices() if devices is None else devices
        if not own_rows:
            oracles = shard(self.oracles, self.start, devices)
            return replace(self, oracles=oracles, find_constants=None, certificate_bounds=None)
        oracles = shard_own(self.oracles, self.start, devices)
        solver = None if self.exact_solver is None else IterativeExactSolver(oracles, self.start)
        return BilevelProblem(oracles, self.start, solver, self.name, self.metrics, is_certified=self.is_certified)

    def check(self, *, seed: int = 0, tolerance: float | None = None, hypergradients: bool = False) -> dict[str, float]:
        """Return the relative errors of derivatives against finite differences near the start; refuse a wrong one.

        Parameters
        ----------
        seed : of the point, which is near the start, and of the direction
        tolerance : largest error that passes; by default 1e-5, and 1e-2 for losses that round to float32 by themselves
        hypergradients : compare the methods of `bilevel.hypergradient` too, which takes some hundreds of products
        """
        largest = default_tolerance(self.oracles, self.start) if tolerance is None else tolerance
        [largest] = check_positive(tolerance=largest)
        if not isinstance(hypergradients, bool):
            raise ValueError(f"`hypergradients={hypergradients!r}`: must be True or False.")
        errors, point, move = check_derivatives(self.oracles, self.start, seed, largest)
        if hypergradients:
            found = compare(self, point, move.outer_var)
            refuse_large(found, largest, "the exact hypergradient")
            errors |= found
        return errors

    def __repr__(self) -> str:
        sizes = (sum(np.size(leaf) for leaf in jax.tree.leaves(part)) for part in self.start[:2])
        numbers = "z of {:,} and x of {:,} numbers".format(*sizes)
        return f"<BilevelProblem {self.name!r}: {self.n_inner:,} + {self.n_outer:,} rows, {numbers}, {self.dtype}>"

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
        if self.oracles.is_on_host:
            raise ValueError(f"`constants`: {NOT_SOLVED}; build the problem from some of the rows, as arrays.")
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
        """Return the function from a point to its certificate; making it may take a pass over all rows."""
        return Certifier(self)

    def fingerprint(self) -> str:
        """Return a digest of the start, the kind of oracles and all that they hold; it is computed once.

        Where the rows lie on devices of several processes, the first call must be made by all of them.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        kind = f"{type(self.oracles).__name__}{getattr(self.oracles, 'compute_dtype', None) or ''}"
        return digest((self.oracles, self.start), kind).hex()


def _level_losses(*given: Loss | None) -> list[tuple[Loss, bool]]:
    """Return the loss of each level, and whether it is of a batch; refuse a level with none or two."""
    losses = []
    for level, one, batch in (("inner", given[0], given[2]), ("outer", given[1], given[3])):
        if (one is None) == (batch is None):
            got = "both" if batch is not None else "neither"
            raise ValueError(f"`{level}_loss`, `{level}_batch_loss`: give one of the two, got {got}.")
        losses.append((one, False) if batch is None else (batch, True))
    return losses  # type: ignore[return-value]


def _lay_out_for(loss: Loss, of_batch: bool, rows: PyTree, dtype: np.dtype, rng: np.random.Generator) -> Samples:
    """Return the samples of a level: rows first for a loss of a batch, with keys for one that takes them."""
    samples = lay_out_rows(rows, dtype, rng, 0 if of_batch else NARROW)
    return replace(samples, key_words=jnp.zeros(2, jnp.uint32)) if takes_key(loss) else samples


def _check_loss(level: str, oracles: AutodiffOracles, start: Point) -> Any:
    """Return the traced derivatives; refuse a loss that fails on one sample, or has none. Nothing is computed."""
    name, inner = f"{level}_loss", (oracles.inner_loss, oracles.inner_samples, oracles.inner_of_batch)
    outer = oracles.outer_loss, oracles.outer_samples, oracles.outer_of_batch
    loss, samples, of_batch = inner if level == "inner" else outer
    if of_batch:
        name = f"{level}_batch_loss"
        jax.eval_shape(oracles.inner_value if level == "inner" else oracles.outer_value, start)
    else:
        jax.eval_shape(checked(name, loss), start.inner_var, start.outer_var, samples.one())
    try:
        traced = jax.make_jaxpr(oracles.inner if level == "inner" else oracles.outer)(start)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        way = " Where its gradients alone can be had, say `second_derivatives=False`." if level == "inner" else ""
        raise ValueError(f"`{name}`: JAX cannot take its derivatives over many samples: {reason}{way}") from error
    if any(isinstance(constant, jax.core.Tracer) for constant in traced.consts):
        raise ValueError(f"`{name}` keeps an array that JAX has traced, and uses it in the next call; compute it anew.")
    return traced


def lay_out_rows(data: PyTree, dtype: np.dtype, rng: np.random.Generator, narrow: int) -> Samples:
    """Return the samples of a level, on the device unless they are to stay on the host."""
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
    """Return what every oracles class takes, from the checked rows of both levels, and the start of a run.

    A default of z or x stands for None and says what shape is due. Rows of at most ``narrow`` numbers are laid out with
    the samples last. Levels whose data are one object share them. Other parameters as for
    `BilevelProblem.from_losses`; ``rng`` shuffles the rows.
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
