"""Measurements for `bench`, `check` and `calibrate`: of servers, answers and kernels."""
