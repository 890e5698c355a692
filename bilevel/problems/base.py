"""A bilevel problem: oracles and a start, with exact solutions, constants and certificates if they are known."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import Point, PyTree
from bilevel.oracles import (
    AutodiffOracles,
    DifferenceOracles,
    HostData,
    HostSamples,
    Oracles,
    OuterTerm,
    Samples,
    TaskOracles,
)
from bilevel.oracles.autodiff import BatchLoss, Loss, has_convolutions, takes_key
from bilevel.oracles.host_samples import head
from bilevel.oracles.samples import NARROW
from bilevel.oracles.sharding import digest, shard
from bilevel.problems.certificate import Certifier, Constants, ConstantsRule, PointBounds, implied
from bilevel.problems.checks import (
    as_array,
    check_bounds,
    check_choice,
    check_data,
    check_flag,
    check_positive,
    check_range,
    check_same_columns,
    check_sizes,
    check_variable,
    make_rng,
)
from bilevel.problems.derivatives import check_derivatives
from bilevel.problems.exact import ExactSolver, IterativeExactSolver
from bilevel.problems.tasks import task_oracles

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
    builder.__doc__ = inspect.cleandoc(builder.__doc__ or "") % _DESCRIPTIONS
    return builder


@dataclass(frozen=True)
class Differentiation:
    """How the losses of :meth:`BilevelProblem.from_losses` are differentiated.

    Parameters
    ----------
    accumulate : number of parts of each batch, which are read one after the other. The derivatives are the same and
        need less memory
    compute_dtype : "bfloat16" lets losses compute in this dtype if runs are in float32. Variables, sums, and
        derivatives stay in float32, and everything that is computed in float64 does not change
    second_derivatives : set it to False if JAX cannot differentiate the gradients of ``inner_loss``, for example
        because it calls other programs. Products are then differences of gradients, without exact solutions
    """

    accumulate: int = 1
    compute_dtype: str | None = None
    second_derivatives: bool = True

    def __post_init__(self) -> None:
        check_sizes(accumulate=self.accumulate)
        check_flag(second_derivatives=self.second_derivatives)
        if self.compute_dtype is not None:
            check_choice("compute_dtype", self.compute_dtype, ("bfloat16", "float16"))


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
    info : known numbers, such as ``v_radius``, a bound of ||v*(x)||, or ``mu_h``, the strong convexity of h
    find_constants : the function behind `constants`, or None
    certificate_bounds : a function of the problem that returns the `PointBounds` of certificates, or None
    """

    oracles: Oracles
    start: Point
    exact_solver: ExactSolver | None = None
    name: str = "problem"
    metrics: Mapping[str, Callable[[Point], Any]] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    find_constants: ConstantsRule | None = None
    certificate_bounds: "Callable[[BilevelProblem], PointBounds] | None" = None

    @classmethod
    def from_losses(
        cls,
        inner_loss: Loss | BatchLoss,
        outer_loss: Loss | BatchLoss,
        inner_data: PyTree,
        outer_data: PyTree,
        inner_var: PyTree,
        outer_var: PyTree,
        *,
        outer_bounds: Any = None,
        strongly_convex: bool = False,
        differentiation: Differentiation | None = None,
        metrics: dict[str, Callable[[Point], Any]] | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
    ) -> "BilevelProblem":
        """Build a problem from losses of one sample, or of a batch.

        A loss with an argument ``key`` is random, as with dropout or augmentation. It gets a different key for each row
        of each step, or for each batch, and the same keys in every evaluation of a run. The auxiliary variable starts
        at 0, and the name of the problem is "custom"; `dataclasses.replace` changes ``start`` and ``name``.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, sample) -> scalar``, in jax.numpy, of one row of the data,
            or a :class:`bilevel.BatchLoss`
        inner_data, outer_data : pytrees of arrays, first axis = samples; integer leaves stay integers. A
            :class:`bilevel.HostData` stays on the host
        inner_var, outer_var : the start, pytrees of floats
        outer_bounds : (lower, upper) bounds of the outer variable, each None, a number, or like ``outer_var``
        strongly_convex : set it to True if the inner loss is strongly convex in ``inner_var``. Runs are then evaluated
            by exact hypergradients, from Newton's method and conjugate gradients in float64
        differentiation : a :class:`bilevel.Differentiation`, if the losses need less memory, compute in another dtype,
            or have no second derivatives
        metrics : additional metrics of runs, name -> function of the point
        dtype : "float32" or "float64", in which runs compute; by default the one that JAX gives to the data
        seed : seed of the shuffle of the rows
        """
        check_flag(strongly_convex=strongly_convex)
        differentiation = Differentiation() if differentiation is None else differentiation
        if not isinstance(differentiation, Differentiation):
            raise ValueError(f"`differentiation={differentiation!r}`: must be a bilevel.Differentiation.")
        if strongly_convex and not differentiation.second_derivatives:
            needed = "`second_derivatives=False`: exact solutions, which `strongly_convex=True` asks for, need them"
            raise ValueError(f"{needed}; leave one of the two out.")
        losses = inner_loss, outer_loss
        if strongly_convex and any(map(takes_key, losses)):
            raise ValueError("`strongly_convex=True`: a loss that takes a `key` is random and has no exact solution.")
        dtype = resolve_dtype(dtype, inner_data=head(inner_data), outer_data=head(outer_data))
        if strongly_convex and any(isinstance(level, HostData) for level in (inner_data, outer_data)):
            raise ValueError(f"`strongly_convex=True`: {NOT_SOLVED}; leave it out.")
        names, given = ("inner_data", "outer_data"), (inner_data, outer_data)
        check_same_columns(names, given, reordered=True)
        data = [check_data(*level, on_host=True) for level in zip(names, given, strict=True)]
        for level, rows in zip(names, data, strict=True):
            check_range(level, rows, dtype)
        z, x = check_variable("inner_var", inner_var, dtype), check_variable("outer_var", outer_var, dtype)
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise ValueError(f"`metrics={metrics!r}`: must be a dict, name -> function of the point.")
        bounds, start, rng = check_bounds(outer_bounds, x), Point(z, x, jax.tree.map(np.zeros_like, z)), make_rng(seed)
        with arithmetic(dtype):
            inner, outer = (_lay_out_for(loss, rows, dtype, rng) for loss, rows in zip(losses, data, strict=True))
            kind = AutodiffOracles if differentiation.second_derivatives else DifferenceOracles
            oracles = kind(
                *(inner, outer, bounds),
                inner_loss=inner_loss,
                outer_loss=outer_loss,
                accumulate=differentiation.accumulate,
                compute_dtype=differentiation.compute_dtype,
            )
            traced = [_check_loss(level, oracles, start) for level in ("inner", "outer")]
            oracles = replace(oracles, convolves=any(map(has_convolutions, traced)))
        exact_solver = IterativeExactSolver(oracles, start) if strongly_convex else None
        return cls(oracles, start, exact_solver, "custom", metrics)

    @classmethod
    def from_task_losses(
        cls,
        inner_loss: Loss,
        outer_loss: Loss,
        tasks: PyTree | Callable[[jax.Array], PyTree],
        inner_start: Any,
        outer_var: PyTree,
        *,
        keep: bool = False,
        n_evaluated: int = 64,
        outer_bounds: Any = None,
        metrics: dict[str, Callable[[Point], Any]] | None = None,
        dtype: DTypeLike | None = None,
        seed: int = 0,
    ) -> "BilevelProblem":
        """Build a problem with one inner variable per task: meta-learning, or one solution per image.

        h is the mean of the outer losses of all tasks. Batches are drawn from tasks, and an oracle call is a derivative
        of the loss of one task. `bilevel.adapt` returns the inner variables of new tasks.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, task) -> scalar`` with the inner variable of the task
        tasks : pytree of arrays, first axis = tasks, each with all of its data for both losses; or a function that
            makes a task from a random key, which is called with 65,536 different keys
        inner_start : ``inner_start(outer_var, task)``, the start of the inner variable, or an array or pytree for all
            tasks. With an argument ``key`` it is random. For MAML it returns ``outer_var``, for ANIL a part of it
        outer_var : the start, a pytree of floats
        keep : by default inner variables are restarted in each step, and h is the outer loss after the inner steps of
            the solver, ITD or AIDCG. True keeps inner variables and v from step to step; h is then the outer loss at
            the minimizers of the inner losses, and solvers such as SOBA or StocBiO can be used
        n_evaluated : number of tasks at which runs are evaluated if inner variables are restarted
        outer_bounds : (lower, upper) bounds of x, each None, a number, or like ``outer_var``
        metrics : additional metrics of runs, name -> function of the point
        dtype : "float32" or "float64"; by default the one that JAX gives to the data
        seed : seed of the shuffle of the tasks
        """
        options = {"keep": keep, "n_evaluated": n_evaluated, "outer_bounds": outer_bounds, "dtype": dtype, "seed": seed}
        oracles, start = task_oracles(inner_loss, outer_loss, tasks, inner_start, outer_var, **options)
        return cls(oracles, start, None, "tasks", {} if metrics is None else metrics)

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
        if isinstance(self.oracles, TaskOracles):
            raise ValueError("`sharded`: problems of tasks run on one device.")
        if self.oracles.is_on_host:
            raise ValueError("`sharded`: rows of a `HostData` are read for one device; build the problem from arrays.")
        devices = jax.devices() if devices is None else devices
        oracles = shard(self.oracles, self.start, devices, own_rows)
        if not own_rows:
            return replace(self, oracles=oracles, find_constants=None, certificate_bounds=None)
        solver = None if self.exact_solver is None else IterativeExactSolver(oracles, self.start)
        return BilevelProblem(oracles, self.start, solver, self.name, self.metrics)

    def with_outer_term(self, term: OuterTerm) -> "BilevelProblem":
        """Return the problem of minimizing h(x) + R(x), for which solvers take proximal or mirror steps of x.

        Columns of values then include R, and ``hypergrad_norm_sq`` is ||x - prox(x - ∇h)||².

        Parameters
        ----------
        term : R, a :class:`bilevel.L1`, :class:`bilevel.Simplex` or own :class:`bilevel.oracles.OuterTerm`
        """
        complaint: str | None = "must be an OuterTerm such as bilevel.L1(0.1)"
        if isinstance(term, OuterTerm):
            complaint = term.check(self.start.outer_var, self.oracles.outer_bounds is not None)
        if complaint:
            raise ValueError(f"`with_outer_term({term!r})`: {complaint}.")
        return replace(self, oracles=replace(self.oracles, outer_term=trees.to_numpy(term, self.dtype)))

    def check(self, *, seed: int = 0, tolerance: float | None = None) -> dict[str, float]:
        """Compare derivatives with finite differences near the start, and raise ValueError if one of them is wrong.

        Parameters
        ----------
        seed : seed of the point, which is near the start, and of the direction
        tolerance : largest accepted error; by default 1e-5, and 1e-2 for losses that compute in float32 by themselves

        Returns
        -------
        errors : relative errors by the name of the derivative
        """
        return check_derivatives(self, seed, tolerance)

    def __repr__(self) -> str:
        sizes = (sum(np.size(leaf) for leaf in jax.tree.leaves(part)) for part in self.start[:2])
        numbers = "z of {:,} and x of {:,} numbers".format(*sizes)
        return f"<BilevelProblem {self.name!r}: {self.n_inner:,} + {self.n_outer:,} rows, {numbers}, {self.dtype}>"

    def constants(self, *, radius: float | None = None, box: tuple[Any, Any] | None = None) -> Constants:
        """Return the constants of ass:regul_F and ass:regul_G of this problem.

        For quadratics they are exact everywhere, except L0_F, which is infinite, and is bounded on a region if
        ``radius`` is given. For logistic selection and data cleaning they are proved on a region. For other problems
        they are unknown.

        Parameters
        ----------
        radius : radius of the ball of z. By default a ball that contains the start and all z*(x), as G(z*) <= G(0)
        box : (lower, upper) limits of x, numbers or like x; by default finite bounds of the problem, and otherwise the
            start plus and minus 1. Data cleaning needs no limits
        """
        if self.oracles.is_on_host:
            raise ValueError(f"`constants`: {NOT_SOLVED}; build the problem from some of the rows as arrays.")
        if self.find_constants is None:
            known = "those of `quadratic`, `data_cleaning` and logistic `penalty_selection` are"
            raise ValueError(f"`constants`: the constants of {self.name!r} are not known; {known}.")
        if radius is not None:
            [radius] = check_positive(radius=radius)
        values, how, region = self.find_constants(self, radius, box)
        follows = implied(**{name: values[name] for name in ("mu_G", "L0_F", "L1_F", "L1_G", "L2_G")})
        return Constants(**follows | values, how=dict.fromkeys(follows, "bound") | how, region=region)

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
        kind += "" if self.oracles.outer_term is None else type(self.oracles.outer_term).__name__
        return digest((self.oracles, self.start), kind).hex()


def _lay_out_for(loss: Loss | BatchLoss, rows: PyTree, dtype: np.dtype, rng: np.random.Generator) -> Samples:
    """Return the samples of a level: rows first for a loss of a batch, and with keys for a loss that takes them."""
    samples = lay_out_rows(rows, dtype, rng, 0 if isinstance(loss, BatchLoss) else NARROW)
    return replace(samples, key_words=jnp.zeros(2, jnp.uint32)) if takes_key(loss) else samples


def _check_loss(level: str, oracles: AutodiffOracles, start: Point) -> Any:
    """Return the traced derivatives; raise ValueError for a loss that fails or has no derivatives."""
    name = f"{level}_loss"
    jax.eval_shape(getattr(oracles, f"{level}_value"), start)
    try:
        traced = jax.make_jaxpr(getattr(oracles, level))(start)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if level == "inner":
            reason += " If only its gradients exist, say `Differentiation(second_derivatives=False)`."
        raise ValueError(f"`{name}`: JAX cannot take its derivatives over many samples: {reason}") from error
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
