"""The commands of `trainwright data`."""
