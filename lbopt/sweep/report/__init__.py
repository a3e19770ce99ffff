"""The page of a study: figures, tables, protocol."""
