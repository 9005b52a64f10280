"""Phase 3: one training order over all datasets, packed tokens and the vocabulary map."""
