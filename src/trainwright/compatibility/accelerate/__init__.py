"""Accelerate's configuration files: read, translated to recipe keys, written and launched.

    reading      a file, or the environment that `accelerate launch` gives its workers, as one plain mapping
    translation  the translation of that mapping, with what is unsupported or contradictory
    strategies   the parts of it that FSDP and DeepSpeed have
    machine      whether this machine supports it, what would run here, and all of it on one screen
    launcher     what the core calls for a file or the environment of a worker; the variables of that environment
    writing      a new file

Accelerate itself is not needed for any of it. The translation of its keys and variables is that of its 1.15 release.
"""
