"""Graceful stops: signals, stop requests, and the remaining time of a job."""
