"""Jobs of any cluster: what they ask for, and which run they train."""
