"""Commands for other launchers and scripts of one's own, and the options of nodes and hosts."""
