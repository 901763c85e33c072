"""The processes of a run: who they are, where they meet, and whether they agree."""
