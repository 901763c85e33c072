"""Records of a simulated or a real run: the device's memory, collectives, and waits of the host."""
