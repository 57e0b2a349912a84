"""The commands that a user types, one file each; `render` is the only place that prints."""
