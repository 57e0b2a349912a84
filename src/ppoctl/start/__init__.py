"""Steps before a run: checks of recipe, files and machine, and the submission to Slurm."""
