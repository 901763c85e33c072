"""Where rows and texts come from: files, directories, the Hub, and what is built in."""
