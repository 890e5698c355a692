"""Compiled programs, which are let go when there are many.

JAX keeps every program that it compiles. Those of a run take some thirty megabytes and some hundred of the 65 530
memory maps that Linux allows a process, without which XLA crashes: a process would end after about 130 problems.
"""

import jax

from bilevel._types import PyTree

MOST_KINDS = 32  # of pairs of solver and problem, by structure and shapes, whose programs are kept
_kinds: set[int] = set()


def keep_few(*arguments: PyTree) -> None:
    """Take note that programs of these arguments are about to be compiled; of too many kinds, all before are let go."""
    leaves, structure = jax.tree.flatten(arguments)
    kind = hash((structure, *((leaf.shape, leaf.dtype) for leaf in map(jax.typeof, leaves))))
    if kind not in _kinds and len(_kinds) >= MOST_KINDS:
        _kinds.clear()
        # To clear the caches of our functions alone leaves what JAX has traced for them, some megabytes a run.
        jax.clear_caches()
    _kinds.add(kind)
