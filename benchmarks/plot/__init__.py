"""Draws the pictures of the documentation from recorded results."""

SUITES = ("gain",)
