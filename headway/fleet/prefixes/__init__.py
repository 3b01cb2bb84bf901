"""Which prefixes each replica has in its cache."""
