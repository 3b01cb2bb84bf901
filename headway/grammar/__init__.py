"""Structured output: grammars, their checks, and JSON schemas."""
