"""Preference tuning with DPO, IPO and KTO."""
