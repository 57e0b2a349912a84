"""How a run gets to a cluster of Slurm, and what becomes of its jobs. Light: the standard library and Slurm's own
programs; a job is asked for by text and answered by text."""
