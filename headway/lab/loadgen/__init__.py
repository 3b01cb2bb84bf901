"""A load generator for OpenAI-compatible servers."""
