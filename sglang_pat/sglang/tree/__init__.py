"""What SGLang tells of a step and of its radix tree, as host data for the planner."""
