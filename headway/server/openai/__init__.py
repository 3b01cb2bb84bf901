"""Endpoints of OpenAI's API beyond completions."""
