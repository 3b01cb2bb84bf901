"""Endpoints of Anthropic's API."""
