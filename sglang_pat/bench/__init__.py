"""Times attention on a GPU, pat beside FlashInfer and FA3."""
