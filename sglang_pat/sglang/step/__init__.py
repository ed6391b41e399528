"""Work of each step: does it repeat the last one, and if not, what is its plan?"""
