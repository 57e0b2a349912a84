"""Reports of a running run: MLflow mirror, console, health rules."""
