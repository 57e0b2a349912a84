"""Ray: processes beyond this one. Knows neither models nor PPO."""
