"""The numbers of a model that its memory and time follow from, by family."""
