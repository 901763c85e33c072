"""Scripts of a user's own, started in several processes."""
