"""What is good: scorers, and the child processes they run in."""
