"""Whom we tell: metric registry, MLflow mirror, console."""
