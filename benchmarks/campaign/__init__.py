"""Faults on purpose: what is tried, what survives, what is lost.

    python -m benchmarks.campaign [--only kills,writers,…] [--quick] [--seed 0] [--out reports/campaign.md]

A section is a module of this package. The first line of its docstring is its heading, and ``rows(seed, quick)`` returns
a `table.Row` for each kind of fault. `SECTIONS` lists them.
"""
