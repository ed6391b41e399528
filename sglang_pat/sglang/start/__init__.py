"""Decisions before the first step: options, environment, which layers pat decodes.

`layer_support` changes once more: a warm-up step may show that a layer must fall back.
"""
