"""What all folders use: the command line, metadata, results, the terminal."""
