"""AccBiO and AccBiO-BG: accelerated gradient steps on all levels, where h is strongly convex.

Ji, Liang. Lower Bounds and Accelerated Algorithms for Bilevel Optimization. JMLR 24(22), 2023, arXiv 2102.03926.
Confidence: low for the constants, medium for the structure; only the abstract of the text was available.

Every step is a full-batch pass. With α = 1/L_y the step of z, γ = α/r = 1/L_h the step of x, and q = √(α μ_y):

    c = (1 - q)/(1 + q);   λ = 4α/(1 + q)²
    s = z;   N times:   y = s - α ∇z G(s, x̃);   s ← y + c (y - z);   z ← y
    w = v;   M times:   (v, w) ← (v - λ (H v + ∇z F(z, x̃)) + c² (v - w), v)            H = ∇²zz G(z, x̃)
    g = (∇²xz G) v + ∇x F   at (z, x̃)
    "bg":        y ← x̃ - γ g with the last y in y°;   x̃ ← y + c_x (y - y°)              c_x is c with q = √(γ μ_x)
    "general":   s = √(γ μ_x / 2);   x ← x̃ s/2 + (1 - s/2) x - γ g/(2s);   y ← x̃ - γ g/2;
                 x̃ ← (s x + 2 y)/(s + 2)

x and x̃ start at y, which is the x of a run. "bg" is the form for bounded gradients of F in z. Choices made here: both
loops start from the last z and v, and without momentum.
If h is convex but not strongly, add ε ||x||²/(2 R) to F, with R a bound of ||x*||², and give ε/R as μ_x.
Cost (N + 1) n for gradients and the product with x, M n, 2m. Memory 3p + 2d. Adaptive: nothing.
"""

from dataclasses import replace
from typing import NamedTuple, Self

import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import given, one_of, positive, whole
from bilevel.solvers.moves import move, repeat

_UNKNOWN = (
    "must be given: only problems made by `quadratic` declare it. If you do not know that h is strongly convex, use "
    "another solver such as SRBA."
)


class AccBiOState(NamedTuple):
    """The iterate (z, y, v), and the other sequence of x: x̃ in "bg", and x in "general"."""

    point: Point
    other: PyTree


@solver
class AccBiO(Solver[AccBiOState, object]):
    """Accelerated bilevel optimizer, for problems whose h is strongly convex.

    Parameters
    ----------
    step_size : α, at most 1/L_y for the smoothness L_y of G in z
    outer_ratio : r = L_h/L_y, so that the step of x is 1/L_h for the smoothness L_h of h
    batch_size : has no effect, since every step is a full-batch pass
    strong_convexity : μ_y of G in z. None means that of the problem, which only quadratics declare
    outer_strong_convexity : μ_x of h. None means that of the problem, which only quadratics declare
    n_inner_steps : N, accelerated steps of z per outer step
    n_v_steps : M, steps of v by the heavy-ball method per outer step
    form : "bg", which was faster wherever both were compared, or "general"
    sampling : "full" only
    """

    strong_convexity: float | None = positive(default=None, optional=True, hint="; use None for that of the problem")
    outer_strong_convexity: float | None = positive(
        default=None, optional=True, hint="; use None for that of the problem"
    )
    n_inner_steps: int = whole(default=20)
    n_v_steps: int = whole(default=20)
    form: str = one_of(("bg", "general"), default="bg")
    sampling: str = one_of(("full",), default="full", kw_only=True)
    needs_constants = True
    needs_plain_outer_step = "its steps of x are accelerated"
    takes_outer_term = False
    complexity = Complexity("Õ((n+m) (L_y/μ_y)^1/2 (L_h/μ_x)^1/2)", "full batches, h strongly convex")

    def configure(self, problem: BilevelProblem) -> Self:
        mu_y, mu_x = self.strong_convexity, self.outer_strong_convexity
        mu_y = problem.info.get("mu_G") if mu_y is None else mu_y
        mu_x = problem.info.get("mu_h") if mu_x is None else mu_x
        for name, value in {"strong_convexity": mu_y, "outer_strong_convexity": mu_x}.items():
            if value is None:
                raise ValueError(f"`AccBiO({name}=None)`: the constant {_UNKNOWN}")
        return replace(self, strong_convexity=mu_y, outer_strong_convexity=mu_x)

    def init(self, oracles: Oracles, start: Point) -> AccBiOState:
        return AccBiOState(start, start.outer_var)

    def step(self, oracles: Oracles, state: AccBiOState, index: Array, draw: object) -> AccBiOState:
        y, step = state.point.outer_var, self.step_size / self.outer_ratio
        speed = _speed(step, given(self.outer_strong_convexity))
        share = speed / jnp.sqrt(2.0)
        at = state.other if self.form == "bg" else move(y, trees.subtract(y, state.other), share / (share + 2))
        point = self._solve(oracles, state.point._replace(outer_var=at))
        grad = trees.add(oracles.cross(point), oracles.outer_grad_outer(point))
        if self.form == "bg":
            new = oracles.project(move(at, grad, step))
            other = move(new, trees.subtract(y, new), _momentum(speed))
        else:
            new = oracles.project(move(at, grad, step / 2))
            other = move(move(state.other, trees.subtract(state.other, at), share / 2), grad, step / (2 * share))
        return AccBiOState(point._replace(outer_var=new), oracles.project(other))

    def _solve(self, oracles: Oracles, point: Point) -> Point:
        """Return the point after the loops of z and v."""
        speed = _speed(self.step_size, given(self.strong_convexity))
        momentum, v_step = _momentum(speed), 4 * self.step_size / (1 + speed) ** 2

        def descend(loop: tuple[PyTree, PyTree], rows: object) -> tuple[PyTree, PyTree]:
            z, ahead = loop
            new = move(ahead, oracles.inner_grad(point._replace(inner_var=ahead)), self.step_size)
            return new, move(new, trees.subtract(z, new), momentum)

        z, _ = repeat(self.n_inner_steps, None, descend, (point.inner_var, point.inner_var))
        point = point._replace(inner_var=z)
        right_side = oracles.outer_grad(point)

        def roll(loop: tuple[PyTree, PyTree], rows: object) -> tuple[PyTree, PyTree]:
            v, last = loop
            new = move(v, trees.add(oracles.hvp(point._replace(v=v)), right_side), v_step)
            return move(new, trees.subtract(last, v), momentum**2), v

        v, _ = repeat(self.n_v_steps, None, roll, (point.v, point.v))
        return point._replace(v=v)

    def calls(self, oracles: Oracles, draw: object, refresh: bool) -> Calls:
        n, m = oracles.n_inner, oracles.n_outer
        return Calls(
            inner_grad=self.n_inner_steps * n, hvp=self.n_v_steps * n, cross=n, outer_grad=m, outer_grad_outer=m
        )


def _speed(step: Scalar, strong_convexity: Scalar) -> Array:
    """Return the inverse root of the condition number that a step and a constant imply."""
    return jnp.sqrt(jnp.minimum(step * strong_convexity, 1))


def _momentum(speed: Array) -> Array:
    return (1 - speed) / (1 + speed)
