"""Convert rows of any format to tokens, and to the stream of examples for training."""
