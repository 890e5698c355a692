"""Running solvers: one driver for a single run and for a sweep, its metrics, results, checkpoints and logs."""
