"""What operators read: the log, metrics, a stats file, and which layers pat decodes."""
