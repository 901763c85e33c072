"""A run, from its request to the end of its workers. Begin with start.py, and joined.py for other launchers."""
