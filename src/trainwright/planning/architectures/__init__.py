"""The sizes of a model that determine its memory and time, by family."""
