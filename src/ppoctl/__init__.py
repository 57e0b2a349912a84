"""PPO for language models that you can plan, kill, resume and prove."""

__version__ = "0.1.0"
