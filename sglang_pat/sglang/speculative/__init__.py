"""Speculative decoding: verify steps, draft models, trees of drafts."""
