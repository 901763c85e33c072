"""Who belongs to a job: its secret, and the door behind which its members talk."""
