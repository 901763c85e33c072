"""What is measured of an answer, one small file a kind; the names are in registry.py."""
