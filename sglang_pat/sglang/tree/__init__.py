"""Reads SGLang's steps and radix tree into host data for the planner."""
