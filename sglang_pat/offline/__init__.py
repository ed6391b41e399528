"""Tools that use SGLang without a server: for models, flags and a simulated cache."""
