"""Hypothesis strategies of invalid input, one module per area, and the judge of their outcomes."""
