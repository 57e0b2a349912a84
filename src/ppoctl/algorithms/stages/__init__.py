"""Stages of a PPO step, one file per stage: each is a function from immutable inputs to one immutable record."""
