"""Thin Prefect tasks over the library."""
