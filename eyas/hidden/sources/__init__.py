"""Where hidden states come from: token ids in, aux states of three blocks and the input of lm_head out."""
