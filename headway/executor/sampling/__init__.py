"""Sampling: from logits to tokens, with grammars and log probabilities."""
