"""Benchmarks: run grids of solvers on a problem, store the results, select the best settings, and report them."""

from bilevel._optional import require

require("msgspec", "bench")
