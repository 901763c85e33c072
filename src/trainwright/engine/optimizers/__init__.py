"""Optimizers besides AdamW and Muon, which are in engine/optimizer.py."""
