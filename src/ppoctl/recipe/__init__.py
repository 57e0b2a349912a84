"""What a user asks for: the typed TOML recipe, where each value was set, and the rules between tables."""
