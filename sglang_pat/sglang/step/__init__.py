"""The work of each step: repeat the last one, or make a plan."""
