"""Known errors of training runs, and how to find in a log which of them was the cause. Imports no torch."""
