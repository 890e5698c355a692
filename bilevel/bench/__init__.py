"""Benchmarks: run grids of solvers on a problem, store the results, select the best settings, and report them."""

from bilevel._core.extras import require

require("msgspec", "bench")
