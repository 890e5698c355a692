"""Studies of the published code, of F²SA and of data cleaning; `reports/reproduction/` has their results."""
