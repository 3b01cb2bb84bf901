"""Choose tokens from logits: sampling, grammars, log probabilities."""
