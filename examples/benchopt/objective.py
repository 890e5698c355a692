from benchopt import BaseObjective
from benchopt.stopping_criterion import SufficientProgressCriterion

from bilevel.engine.metrics import exact_metrics

NAN = float("nan")


class Objective(BaseObjective):
    """Bilevel problems, evaluated at the exact inner solution in float64."""

    name = "Bilevel"
    test_dataset_name = "quadratic"
    sampling_strategy = "callback"
    # The value of a stochastic solver stalls before its hypergradient does.
    stopping_criterion = SufficientProgressCriterion(
        key_to_monitor="hypergrad_norm_sq", patience=6, strategy="callback"
    )

    def skip(self, problem):
        if problem is None:
            return True, "no file of this data set; name its folder in BILEVEL_DATA"
        return False, None

    def set_data(self, problem):
        self.problem = problem

    def get_objective(self):
        return {"problem": self.problem}

    def evaluate_result(self, point, diverged, **progress):
        metrics = {"value": NAN, "hypergrad_norm_sq": NAN}
        if not diverged:
            metrics, _ = exact_metrics(self.problem, point, None)
        return {name: metrics[name] for name in ("value", "hypergrad_norm_sq")} | progress

    def get_one_result(self):
        return {"point": self.problem.start, "diverged": False, "steps": 0, "calls": 0, "seed": 0}
