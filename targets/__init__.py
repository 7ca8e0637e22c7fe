"""What a target is: its config, weights, tokenizer, prompts and hidden states."""
