"""Work of each layer: KV writes, attention under the plans of a step, trees of drafts."""
