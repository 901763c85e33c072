"""The sections of a recipe that are not a task's own."""
