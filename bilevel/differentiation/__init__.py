"""Derivatives of functions that solve equations, for programs that are not bilevel problems of this library."""
