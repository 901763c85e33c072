"""A run on several machines: how they meet and end together, and which of them take part in each launch."""
