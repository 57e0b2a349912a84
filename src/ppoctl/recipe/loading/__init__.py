"""Loading of recipes: layers of sources, validation with all errors in one pass, and the rules between keys."""
