"""What `bench`, `check` and `calibrate` measure: servers, answers and kernels on this machine."""
