"""Studies of unlearning: their rows, tables and plots."""
