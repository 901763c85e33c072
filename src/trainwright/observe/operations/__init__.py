"""What the API offers about runs: each module has the functions of commands that look at runs."""
