"""Certificates: bounds on the error of a hypergradient that need no exact solution."""

from bilevel.certificate.base import Certificate
from bilevel.certificate.rules import Certifier

__all__ = ["Certificate", "Certifier"]
