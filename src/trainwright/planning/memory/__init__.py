"""The predicted memory of a run, by strategy and by phase."""
