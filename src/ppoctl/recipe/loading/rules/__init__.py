"""Rules between keys, one file per subject; `all_rules` runs all of them."""
