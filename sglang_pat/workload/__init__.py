"""Estimates whether pat makes a workload faster: simulates a server without and with pat.

`sglang-pat advise` is the front end. A real server does not use this package. `tree.py` is the
prefix cache, and `server.py` the scheduler. `reads.py` computes how much KV a batch reads, and
`cost.py` how long a step takes. `run.py` simulates the server with each backend, and `verdict.py`
compares the results.
"""
