"""The generated documentation: pages of keys, metrics and algorithms, and the tables that `ppoctl recipes` prints."""
