"""The work of each layer: KV writes, and attention under the plans of a step."""
