"""The stream of examples: what each step sees, and how it is divided into micro-batches."""
