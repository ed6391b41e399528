"""Does pat pay for a workload? One simulated server, one clock, one verdict.

`sglang-pat advise` is its front end. Nothing that serves needs it. From a trace to the answer:
`tree.py` is the prefix cache, `server.py` the scheduler, `reads.py` what a batch reads, `cost.py`
the time that takes, `run.py` serves the trace with both backends, `verdict.py` compares them.
"""
