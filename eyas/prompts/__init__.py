"""Phase 1: prompts of the datasets, converted, cleaned, selected and rendered to ids."""
