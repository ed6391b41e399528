"""Hides FlashInfer where no CUDA driver is present (`sglang_pat.sglang.cpu`).

If the import fails, SGLang works without FlashInfer. Without a driver FlashInfer is useless, but
its import takes a quarter of the start-up time of every process of an engine.
"""

raise ImportError("flashinfer is hidden by sglang_pat.sglang.cpu: there is no CUDA driver")
