"""Tools that need SGLang but no server: models, flags, a simulated cache."""
