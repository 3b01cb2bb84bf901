"""Attention of decodes and of prompts, in faster and in invariant forms, and rotary embeddings."""
