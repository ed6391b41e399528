"""The plug-in for SGLang. Nothing else in the package imports SGLang."""
