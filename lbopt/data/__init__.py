"""Sources to global batches."""
