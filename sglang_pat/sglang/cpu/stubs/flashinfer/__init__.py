"""Hides FlashInfer where no CUDA driver is present (`sglang_pat.sglang.cpu`).

SGLang does without FlashInfer if it cannot import it. Without a driver FlashInfer is useless, but
takes a quarter of the start-up time of every process of an engine.
"""

raise ImportError("flashinfer is hidden by sglang_pat.sglang.cpu: there is no CUDA driver")
