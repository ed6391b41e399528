"""Hides FlashInfer where no CUDA driver is present (see `sglang/cpu`).

SGLang imports it where it can and goes without where it cannot. Without a driver it could do
nothing, but would take a quarter of the time in which each process of an engine starts.
"""

raise ImportError("flashinfer is hidden by sglang_pat.sglang.cpu: there is no CUDA driver")
