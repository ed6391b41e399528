"""Measurements of `bench`, `check`, `calibrate`: servers, answers and kernels on this machine."""
