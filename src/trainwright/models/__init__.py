"""Models, adapters, quantisation and the files that weights are stored in."""
