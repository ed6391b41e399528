"""Reports for operators: the log, metrics, a stats file, and which layers pat decodes."""
