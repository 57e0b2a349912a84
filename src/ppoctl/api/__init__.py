"""Python's way in: what the commands do, as functions, and a run as tables."""
