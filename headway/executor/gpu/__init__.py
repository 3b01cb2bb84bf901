"""The GPU executor."""
