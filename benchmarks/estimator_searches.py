"""Searches of other packages for many penalties; each is left out, with a reason, where its package is missing."""

import importlib

import numpy as np

LOG_LOSS = "neg_log_loss"
FOLDS = 5


class Unavailable(Exception):
    """Why a model cannot be had here, or not for this set."""


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable(f"{module} is not installed") from None


def group_ridge(kind):
    """himalaya's ridge regression with a penalty per group, by random search."""
    group_ridge_cv = need("himalaya.ridge").GroupRidgeCV
    if kind.groups is None:
        raise Unavailable("the set has no groups")
    search = {"n_iter": 100, "alphas": np.geomspace(1e-3, 1e5, 20), "progress_bar": False, "warn": False}
    return group_ridge_cv(kind.groups, cv=FOLDS, fit_intercept=True, random_state=0, solver_params=search)


def describe_group_ridge(model):
    return f"log-weights of groups {np.round(np.ravel(model.deltas_), 1).tolist()[:8]}"


class OptunaPerGroup:
    """A penalty per group of columns by Optuna's TPE on five folds, in 50 trials of which three are alike for all."""

    def __init__(self, kind, trials=50):
        self.optuna, self.kind, self.trials = need("optuna"), kind, trials
        if kind.groups is None or max(kind.groups) >= 20:
            raise Unavailable("no groups, or more than 20")
        self.names = [f"group {group}" for group in range(max(kind.groups) + 1)]

    def fit(self, X, y):
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        study = self.optuna.create_study(direction="maximize", sampler=self.optuna.samplers.TPESampler(seed=0))
        for level in (1.0, 1e2, 1e4):
            study.enqueue_trial(dict.fromkeys(self.names, level))
        study.optimize(lambda trial: self.score(trial, X, y), n_trials=self.trials)
        self.penalties = self.of_columns(study.best_params)
        self.model = self.plain().fit(self.scale(X), y)
        return self

    def score(self, trial, X, y):
        from sklearn.model_selection import cross_val_score

        self.penalties = self.of_columns({name: trial.suggest_float(name, 1e-2, 1e5, log=True) for name in self.names})
        scoring = "neg_mean_squared_error" if self.kind.task == "regression" else LOG_LOSS
        return cross_val_score(self.plain(), self.scale(X), y, cv=FOLDS, scoring=scoring).mean()

    def of_columns(self, penalties):
        return np.array([penalties[self.names[group]] for group in self.kind.groups])

    def scale(self, X):
        """Columns for which a penalty of one acts as these do."""
        return X / np.sqrt(self.penalties)

    def plain(self):
        from sklearn.linear_model import LogisticRegression, Ridge

        return Ridge(1.0) if self.kind.task == "regression" else LogisticRegression(C=1.0, max_iter=1000)

    def predict(self, X):
        return self.model.predict(self.scale(X))

    def predict_proba(self, X):
        return self.model.predict_proba(self.scale(X))


class SparhoPerFeature:
    """A Lasso with a penalty per feature, learned by sparho's gradients over five folds, from that of LassoCV."""

    def __init__(self, kind):
        self.sparho = need("sparho")

    def fit(self, X, y):
        from sklearn.linear_model import LassoCV

        self.mean = y.mean()
        y, sparho = y - self.mean, self.sparho
        start = np.full(X.shape[1], LassoCV(cv=FOLDS, max_iter=10_000).fit(X, y).alpha_)
        problem = sparho.Problem(sparho.SquaredLoss(), sparho.WeightedL1(), np.asfortranarray(X), y)
        folds = sparho.CrossVal.kfold(len(y), k=FOLDS, warm_start=True)
        solver = sparho.adapters.SklearnWeightedLasso()
        self.penalties = sparho.hoag_search(problem, start, solver=solver, criterion=folds, n_iter=30).best_hyperparam
        self.coef = solver(problem, self.penalties).coef
        return self

    def predict(self, X):
        return X @ self.coef + self.mean


def describe_penalties(model):
    logs = np.log(model.penalties)
    return f"{np.exp(logs.mean()):.2g} (log-deviation {logs.std():.2g})"
