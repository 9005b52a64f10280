"""Phase 6: speculative decoding and the benchmark of a served draft."""
