"""Apart from tests, this folder has scripts, which the tests run in separate processes."""

collect_ignore_glob = ["optax_tables.py", "run_*.py", "foreign.py", "algoperf_submission.py"]
