"""The sections of a recipe other than those of tasks."""
