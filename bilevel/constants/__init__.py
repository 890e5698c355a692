"""The constants of regularity of a problem: exact, proved or estimated."""

from bilevel.constants.base import ASSUMED, DERIVED, Constants, implied
from bilevel.constants.region import Region
from bilevel.constants.rules import constants

__all__ = ["ASSUMED", "DERIVED", "Constants", "Region", "constants", "implied"]
