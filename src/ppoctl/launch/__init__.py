"""Where a job runs, and how it is asked to stop."""
