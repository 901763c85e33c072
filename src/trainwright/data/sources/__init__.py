"""Sources of rows and texts: files, directories, the Hub, and built-in ones."""
