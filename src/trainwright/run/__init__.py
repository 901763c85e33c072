"""Starting, joining and supervising worker processes."""
