"""How a job is asked to stop."""
