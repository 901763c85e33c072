"""Trackers of experiments, as observers: they get the figures of ``events.jsonl`` in a thread of their own."""
