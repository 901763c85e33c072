"""The Python API: each function is what the command of the same name calls. Import it as ``trainwright``."""
