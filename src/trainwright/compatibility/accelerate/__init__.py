"""Accelerate's configuration files: read, translated to recipe keys, written and launched.

    reading      a file, or the environment that `accelerate launch` gives its workers, as one plain mapping
    translation      the translation of that mapping, with what is unsupported or contradictory
    machine      whether this machine supports it, and what would run here
    launcher     what the core calls for a file, or for the environment of a worker
    environment  the variables that Accelerate's own library reads in a worker
    showing      all of it on one screen
    writing      a new file
    script       a user's own script as the body of a worker

Accelerate itself is not needed for any of it. The translation of its keys and variables is that of its 1.15 release.
"""
