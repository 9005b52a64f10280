"""The contract with SGLang servers: client, pool, health and metrics."""
