"""The statements of the theory, as running code."""

from bilevel.theory.complexity import measure_complexity
from bilevel.theory.lower_bound import measure_lower_bound
from bilevel.theory.steps import StepSizes, lyapunov, lyapunov_coefficients, step_sizes
from bilevel.theory.worst_case import measure_progress, reach

__all__ = ["StepSizes", "lyapunov", "lyapunov_coefficients", "measure_complexity", "measure_lower_bound"]
__all__ += ["measure_progress", "reach", "step_sizes"]
