"""The solver that needs no tuning: `AutoSRBA` in `solver`, and the parts that only it uses."""

from bilevel.solvers.auto.solver import AutoSRBA as AutoSRBA
