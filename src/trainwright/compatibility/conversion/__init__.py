"""Configurations of other tools as recipes: `trainwright recipe from` (one table a tool, in ``tables``)."""
