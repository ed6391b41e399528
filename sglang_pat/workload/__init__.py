"""Estimates whether pat pays for a workload, by simulating a server with both backends.

`sglang-pat advise` is the front end. A real server does not use this package. `tree.py` is the
prefix cache, and `server.py` the scheduler. `reads.py` computes what a batch reads, and `cost.py`
how long the reads take. `run.py` simulates the server with both backends, and `verdict.py` compares
them.
"""
