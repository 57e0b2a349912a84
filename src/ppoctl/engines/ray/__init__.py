"""Processes outside the driver, managed by Ray. Independent of models and PPO."""
