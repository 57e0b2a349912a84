"""The recipe: its typed TOML tables, the sizes that follow from them, and the origin of each value."""
