"""What is here besides tests are scripts, which tests start in processes of their own."""

collect_ignore_glob = ["optax_tables.py", "run_*.py", "foreign.py", "algoperf_submission.py"]
