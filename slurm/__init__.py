"""Job scripts for SLURM clusters (templates and submission)."""
