"""Does pat pay for a workload? One simulated server, one clock, one verdict.

`sglang-pat advise` is its front end. Serving does not use it. `tree.py` is the prefix cache,
`server.py` the scheduler, `reads.py` computes what a batch reads, and `cost.py` how long that
takes. `run.py` serves the trace with both backends, and `verdict.py` compares them.
"""
