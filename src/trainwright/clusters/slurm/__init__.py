"""Slurm: job files, the scheduler's commands, and the end of a job."""
