"""The statements of the theory, as running code."""

from bilevel.constants import Constants, constants
from bilevel.theory.identities import neumann_mean, recursive_mse, saba_tables, sampled_direction
from bilevel.theory.steps import StepSizes, lyapunov, lyapunov_coefficients, step_sizes
from bilevel.theory.worst_case import progress, reached, zero_chain

__all__ = [
    "Constants",
    "StepSizes",
    "constants",
    "lyapunov",
    "lyapunov_coefficients",
    "neumann_mean",
    "progress",
    "reached",
    "recursive_mse",
    "saba_tables",
    "sampled_direction",
    "step_sizes",
    "zero_chain",
]
