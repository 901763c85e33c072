"""Ways to spread a model over devices."""
