"""Runs on several hosts, started over ssh by one command."""
