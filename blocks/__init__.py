"""Prefect blocks: servers, hosts, storage and alerts."""
