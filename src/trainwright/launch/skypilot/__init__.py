"""SkyPilot: task files."""
