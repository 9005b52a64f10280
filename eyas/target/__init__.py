"""The target: its spec, tokenizer, rendering, reasoning format and weights."""
