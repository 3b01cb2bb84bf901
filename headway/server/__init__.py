"""The engine over HTTP, in OpenAI's words."""
