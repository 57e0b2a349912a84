"""Slurm jobs of a run: submission, status, stop. Calls Slurm's command line programs; imports no torch."""
