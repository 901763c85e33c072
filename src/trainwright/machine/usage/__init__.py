"""What a process of a run and its machine do while it trains."""
