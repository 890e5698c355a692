"""Strategies for everything a user can hand over, a module for each area, and what becomes of an input."""
