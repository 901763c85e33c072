"""Supervised fine-tuning and continued pretraining."""
