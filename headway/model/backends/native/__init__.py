"""The decoder's arithmetic as a small C library, compiled on first use for this machine."""
