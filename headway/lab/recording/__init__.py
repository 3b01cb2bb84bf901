"""Recordings: runs of a scheduler, recorded so that any step can be shown at once."""
