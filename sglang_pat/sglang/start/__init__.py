"""Decisions before the first step: options, environment, which layers pat decodes."""
