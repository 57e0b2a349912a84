"""What you type: one file per command; `render` is the only place that prints."""
