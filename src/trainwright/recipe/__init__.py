"""What the user asked for: the recipe's schema, its YAML files, includes and overrides. Imports no torch."""
