"""The commands that a user types, one module for each command. Only the module `render` prints."""
