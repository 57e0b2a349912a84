"""The order of events: the step function of one PPO step, and the loop over steps."""
