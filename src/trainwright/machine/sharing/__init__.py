"""Files and directories that several processes, nodes and users share."""
