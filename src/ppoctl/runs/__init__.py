"""The life of a run: creation, changed settings, attempts, commands, submission to Slurm, and how an attempt fails."""
