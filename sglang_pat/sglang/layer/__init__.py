"""In each layer, pat stores new KV, and attends by the plans of the step."""
