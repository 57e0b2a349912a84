"""Processes beyond this one, in Ray. Knows neither models nor PPO."""
