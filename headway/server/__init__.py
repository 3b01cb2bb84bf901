"""The HTTP server: OpenAI-compatible and Anthropic-compatible APIs over an engine."""
