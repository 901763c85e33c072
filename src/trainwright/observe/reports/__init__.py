"""What a run did, read from its directory: figures, pages to look at, and comparisons. Imports no torch."""
