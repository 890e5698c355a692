"""The statements of the theory, as running code."""
