"""Headway: an LLM inference engine built around its scheduler."""

__version__ = "0.1.0"
