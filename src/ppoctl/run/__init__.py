"""Life of a run: creation, changed settings, attempts, commands, submission to Slurm, construction, loop, stops."""
