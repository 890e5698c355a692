"""Experiments, audit and measurements for the SRBA paper; run ``python -m paper --help`` from the root of a clone.

Not part of the installed package. Results are kept in ``reports/reproduction/``.
"""
