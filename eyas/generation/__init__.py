"""Phase 2: the target's own responses, journalled, gated and forecast."""
