"""Shared by all folders: the command line, metadata, results, the terminal."""
