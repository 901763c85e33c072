"""Faults: the watcher of hangs, and drills that put faults into short runs."""
