"""The induction of the lower bound: the largest possible reach in each chain, step by step."""

import numpy as np

from bilevel._core.types import Point

ORDERS = ("together", "in_turn")


def zero_chain(queried: np.ndarray, length: int, order: str = "together") -> Point:
    """Return the largest possible reach of z, x and v after each step, given the rows of F that each step reads.

    ∇F enters only v, v enters x through the cross product, and x enters z through ∇z G. If z_j, x_j and v_j are the
    reach in chain j, a step is

        v_j ← max(v_j, z_j + 1) if row j is read;   x_j ← max(x_j, v_j);   z_j ← max(z_j, x_j)

    With "together" all three use the values before the step (SOBA, SABA, SRBA, SPABA): a coordinate of v enters x one
    step later and z two steps later, and the next coordinate enters v at the earliest three steps later. With "in_turn"
    z moves first, then v, then x (AmIGO, StocBiO, BSA, ALSET, TTSA): one coordinate per step. In both cases the reach
    is at most the number of steps that read row j, as in app:eq:iter_z, app:eq:iter_v and app:eq:iter_x.

    Parameters
    ----------
    queried : array (steps, m), how often each step reads each row
    length : T + 1
    order : "together" or "in_turn"

    Returns
    -------
    Point
        Integer arrays (steps + 1, m), beginning with the start.
    """
    if order not in ORDERS:
        raise ValueError(f"`order={order!r}`: must be one of {', '.join(map(repr, ORDERS))}.")
    queried = np.asarray(queried)
    if queried.ndim != 2 or np.any(queried < 0):
        raise ValueError(f"`queried`: must be counts of shape (steps, rows of F), got shape {queried.shape}.")
    z = x = v = np.zeros(queried.shape[1], int)
    path = [Point(z, x, v)]
    for counts in queried > 0:
        old = Point(z, x, v)
        z = np.maximum(z, old.outer_var)
        inner = z if order == "in_turn" else old.inner_var
        v = np.where(counts, np.maximum(v, np.minimum(inner + 1, length)), v)
        x = np.maximum(x, v if order == "in_turn" else old.v)
        path.append(Point(z, x, v))
    return Point(*(np.array(part) for part in zip(*path, strict=True)))
