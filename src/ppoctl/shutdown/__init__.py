"""How a job is asked to stop, and what it may still do in the time that is left."""
