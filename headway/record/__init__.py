"""The record of a run: what happened to a scheduler, in the order in which it was called."""
