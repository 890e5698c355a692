"""A bilevel problem: oracles, a start, and the exact reference it is judged by."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import AutodiffOracles, Oracles, Samples
from bilevel.oracles.autodiff import Loss
from bilevel.oracles.placement import contents, shard, shard_own
from bilevel.precision import arithmetic, as_float_dtype
from bilevel.problems.checks import checked_bounds, checked_data, checked_variable
from bilevel.problems.derivatives import check_derivatives
from bilevel.problems.reference import GenericReferee, Referee
from bilevel.types import Point, PyTree


@dataclass(frozen=True)
class BilevelProblem:
    """min over x of F(z*(x), x), with z*(x) the minimiser of G(., x); F and G are means over samples.

    Attributes
    ----------
    oracles : derivatives of F and G
    start : where runs begin, in the problem's dtype
    referee : gives the exact solution at an outer variable, or None where there is none
    name : for tables and plots
    metrics : more numbers to follow, name -> function of the point, evaluated off the clock
    constants : what is known of the problem in numbers, such as ``v_radius``, a bound of ||v*(x)||
    """

    oracles: Oracles
    start: Point
    referee: Referee | None = None
    name: str = "problem"
    metrics: Mapping[str, Callable[[Point], Any]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)

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
        dtype: DTypeLike = "float32",
        seed: int = 0,
        name: str = "custom",
    ) -> "BilevelProblem":
        """Build a problem from losses of one sample.

        Parameters
        ----------
        inner_loss, outer_loss : ``loss(inner_var, outer_var, sample) -> scalar``, written with jax.numpy;
            ``sample`` is one row of the data, a pytree like it
        inner_data, outer_data : pytrees of arrays, first axis = samples; integer leaves stay integers
        inner_var, outer_var : the start, pytrees of floats
        v : start of the auxiliary variable, like ``inner_var``; zero by default
        outer_bounds : (lower, upper), each None, a number, or like ``outer_var``
        strongly_convex : say True when the inner loss is strongly convex in ``inner_var``: runs are then
            judged by exact hypergradients, computed by L-BFGS and conjugate gradients in float64
        metrics : more numbers to follow, name -> function of the point
        dtype : "float32" or "float64"; what runs compute in
        seed : of the one shuffle of the rows
        name : for tables and plots
        """
        dtype = as_float_dtype(dtype)
        inner_data = checked_data("inner_data", inner_data)
        outer_data = checked_data("outer_data", outer_data)
        inner_var = checked_variable("inner_var", inner_var, dtype)
        outer_var = checked_variable("outer_var", outer_var, dtype)
        v = jax.tree.map(np.zeros_like, inner_var) if v is None else checked_variable("v", v, dtype)
        if jax.tree.map(np.shape, v) != jax.tree.map(np.shape, inner_var):
            raise ValueError("`v` must have the structure and shapes of `inner_var`.")
        bounds = checked_bounds(outer_bounds, outer_var)
        start = Point(inner_var, outer_var, v)
        shuffle = np.random.default_rng(seed)
        with arithmetic(dtype):
            inner_samples = Samples.shuffled(inner_data, dtype, shuffle)
            outer_samples = Samples.shuffled(outer_data, dtype, shuffle)
            _check_loss("inner_loss", inner_loss, start, inner_samples)
            _check_loss("outer_loss", outer_loss, start, outer_samples)
            oracles = AutodiffOracles(
                inner_samples=inner_samples,
                outer_samples=outer_samples,
                outer_bounds=bounds,
                inner_loss=inner_loss,
                outer_loss=outer_loss,
            )
        referee = GenericReferee(oracles, start) if strongly_convex else None
        return cls(oracles, start, referee, name, metrics or {})

    @property
    def dtype(self) -> np.dtype:
        """What runs compute in."""
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
        """Return the same problem, each block of its rows split over devices; runs differ by rounding alone.

        Parameters
        ----------
        devices : all that JAX sees by default, those of other processes too
        own_rows : say True when each process has built the problem from its own rows alone, process p of P from
            ``rows[p::P]``, or from as many as any other: exact metrics are then computed on the devices, from all rows
        """
        devices = jax.devices() if devices is None else devices
        if not own_rows:
            return replace(self, oracles=shard(self.oracles, devices))
        oracles = shard_own(self.oracles, self.start, devices)
        referee = None if self.referee is None else GenericReferee(oracles, self.start)
        return replace(self, oracles=oracles, referee=referee, constants={})

    def check(self, *, seed: int = 0) -> dict[str, float]:
        """Compare every derivative with finite differences in float64, at random points near the start.

        Returns
        -------
        The relative error of each kind of derivative.

        Raises
        ------
        ValueError
            Naming the derivative that disagrees or is not finite.
        """
        return check_derivatives(self.oracles, self.start, seed)

    def fingerprint(self) -> str:
        """Return a digest of the start, the kind of oracles and all that they hold."""
        digest = hashlib.sha256(type(self.oracles).__name__.encode())
        for leaf in jax.tree.leaves((self.oracles, self.start)):
            array = contents(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.data)
        return digest.hexdigest()


def _check_loss(name: str, loss: Loss, start: Point, samples: Samples) -> None:
    sample = samples.one()
    try:
        out = jax.eval_shape(loss, start.inner_var, start.outer_var, sample)
    except Exception as error:
        shapes = jax.tree.map(lambda leaf: leaf.shape, (start.inner_var, start.outer_var, sample))
        raise ValueError(f"`{name}` failed on one sample; its arguments have shapes {shapes}: {error}") from error
    leaves = jax.tree.leaves(out)
    if len(leaves) != 1 or leaves[0].shape != () or leaves[0].dtype.kind != "f":
        got = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        raise ValueError(f"`{name}` must return one real scalar for one sample, got {got}; sum or average it.")
