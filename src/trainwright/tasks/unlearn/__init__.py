"""Unlearning: its objectives, references and losses."""
