"""The kinds of training, one folder each."""
