"""Processes outside the driver, managed by Ray. This package is independent of models and PPO."""
