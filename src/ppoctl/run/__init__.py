"""Life of a run: creation, changed settings, attempts, commands, submission to Slurm, and errors of an attempt."""
