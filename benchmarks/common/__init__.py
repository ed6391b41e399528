"""Modules that all folders use: command line, metadata, results, servers that share a GPU."""
