"""Scorers of responses, and the child processes that run them."""
