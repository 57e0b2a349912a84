"""What you asked for: typed TOML recipes, their origins, the rules between tables, and the plan derived from them."""
