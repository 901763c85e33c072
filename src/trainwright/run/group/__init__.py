"""The processes of a run: their identity, their rendezvous, and the checks that they agree."""
