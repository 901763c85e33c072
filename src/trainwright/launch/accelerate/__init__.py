"""Accelerate's configuration files: read as people have them, mapped to recipe keys, written and launched.

    reading      a file, or the environment that `accelerate launch` gives its workers, as one plain mapping
    meaning      that mapping in the recipe's words, with what has no counterpart and what contradicts itself
    machine      whether this machine can do it, and what would run here
    recipe       a file and a recipe put together
    environment  the variables that Accelerate's own library reads in a worker
    showing      all of it on one screen
    writing      a new file
    script       a user's own script as the body of a worker

Accelerate itself is not needed for any of it. What its keys and variables mean is from its 1.15 release.
"""
