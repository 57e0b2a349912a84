"""What happens, in order: the story of one PPO step, and the run that goes over steps."""
