"""The statements of the theory, as running code."""

from bilevel.theory.steps import StepSizes, lyapunov, lyapunov_coefficients, step_sizes
from bilevel.theory.worst_case import measure_progress, reach

__all__ = ["StepSizes", "lyapunov", "lyapunov_coefficients", "measure_progress", "reach", "step_sizes"]
