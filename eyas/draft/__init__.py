"""Phase 5: the EAGLE-3 draft, its unrolled training, its replay and its export."""
