"""The statements of the theory, as running code."""

from bilevel.theory.steps import StepSizes, lyapunov, lyapunov_coefficients, step_sizes
from bilevel.theory.worst_case import progress, reached, zero_chain

__all__ = [
    "StepSizes",
    "lyapunov",
    "lyapunov_coefficients",
    "progress",
    "reached",
    "step_sizes",
    "zero_chain",
]
