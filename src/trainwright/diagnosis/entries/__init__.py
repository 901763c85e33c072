"""The known errors, one module per topic."""
