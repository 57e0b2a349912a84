"""Rules between keys, one file per subject; `across_tables` runs all of them."""
