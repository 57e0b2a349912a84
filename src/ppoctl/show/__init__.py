"""Views of a run: console, MLflow, plots, the report, and the search for causes."""
