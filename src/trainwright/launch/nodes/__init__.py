"""A run on several machines: the nodes of each launch, and the agent that runs the workers of a node."""
