"""Measures a machine: which requests to run, and a profile fitted to the log of their steps."""
