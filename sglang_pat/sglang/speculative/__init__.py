"""Speculative decoding: verify steps, draft models, and drafts that form trees."""
