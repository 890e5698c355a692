"""The benchmark: whole grids in one program, kept in a store, shown as a page."""

from bilevel._optional import require

require("msgspec", "bench")  # or say how to install what the benchmark needs
