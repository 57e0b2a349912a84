"""Reports of a run to people: MLflow mirror, console, health rules."""
