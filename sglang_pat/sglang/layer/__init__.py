"""What pat does in each layer: it stores new KV, and attends by the plans of the step."""
