"""Decisions at start-up: server options, environment, and which layers pat decodes."""
