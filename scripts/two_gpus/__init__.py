"""What `check_two_gpus.py` runs: processes, models, and what is compared."""
