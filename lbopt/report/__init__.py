"""Self-contained HTML pages and PNG figures from a workdir."""
