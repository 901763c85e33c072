"""What a study of unlearning has beside its runs: its rows, and its table and plot."""
