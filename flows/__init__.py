"""Prefect flows: one per phase, one for the whole, one that watches."""
