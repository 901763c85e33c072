"""How much memory a run needs, by strategy and by phase."""
