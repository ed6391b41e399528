"""The command line: one file for each subcommand of `sglang-pat`."""
