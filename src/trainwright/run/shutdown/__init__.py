"""How a run ends: stop signals, failures, and who failed first."""
