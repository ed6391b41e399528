"""Input from SGLang, its steps and its radix tree, as host data for the planner."""
