"""Phase 4: hidden states of the target, extracted once and stored exactly."""
