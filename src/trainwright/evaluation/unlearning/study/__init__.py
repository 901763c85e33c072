"""What a study of unlearning has beside its runs: its rows, its tokenizer, and its table and plot."""
