"""Shared by all folders: command line, metadata, results, terminal, servers that share a GPU."""
