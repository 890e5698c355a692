"""Have XLA compile the hot loop of a solver into one kernel.

On a CPU XLA runs the body of a loop as some dozens of pieces, each launched by its runtime: for small batches that
costs more than the arithmetic. Loops that touch few bytes are compiled whole instead; XLA's own limit is 1 kB, and a
step of a linear model touches a hundred. Only the environment can raise it, before JAX starts its backends.
"""

import os
import sys

_FLAG, _OPTION = "--xla_backend_extra_options=", "xla_cpu_small_while_loop_byte_threshold"
# Above a step of a linear model or of the quadratics; below a step on rows of hundreds of features and several classes,
# whose products XLA's library computes faster than its own loops, and below a pass over a large data set.
_LIMIT_BYTES = 2**20


def fuse_cpu_loops() -> None:
    """Make steps on a CPU up to twice as fast, for this process and those it starts.

    Call it before JAX computes anything. It adds an option to the environment variable ``XLA_FLAGS`` and keeps what
    else is there; where you set this option yourself, it does nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if any(_OPTION in flag for flag in flags):
        return
    if _jax_runs():
        or_so = f"or start Python with XLA_FLAGS={_FLAG}{_OPTION}={_LIMIT_BYTES}"
        raise RuntimeError(f"`fuse_cpu_loops()` comes too late: JAX runs. Call it before the first array, {or_so}")
    if not all(flag.startswith("--") for flag in flags):
        raise RuntimeError(f"`fuse_cpu_loops()` cannot add to XLA_FLAGS={' '.join(flags)!r}; add {_OPTION} yourself.")
    own = [flag.removeprefix(_FLAG) for flag in flags if flag.startswith(_FLAG)]
    others = [flag for flag in flags if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, _FLAG + ",".join([*own, f"{_OPTION}={_LIMIT_BYTES}"])])


def _jax_runs() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def may_be_fused() -> bool:
    """Tell whether loops are compiled whole, as far as the environment says."""
    flags = os.environ.get("XLA_FLAGS", "")
    return _OPTION in flags and f"{_OPTION}=0" not in flags
