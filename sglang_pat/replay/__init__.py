"""`sglang-pat replay`: a trace of requests through SGLang's radix tree and the pack scheduler.

Beside the pipeline, which it drives as the SGLang backend does, without a model: `trace.py` says
what a trace is, `simulator.py` serves it, `result.py` says what comes out.
"""
