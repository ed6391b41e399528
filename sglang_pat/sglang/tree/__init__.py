"""Reads the steps and the radix tree of SGLang into host data for the planner."""
