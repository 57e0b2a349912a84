"""Python API: the commands as functions, and a run as tables."""
