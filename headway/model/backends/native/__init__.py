"""The decoder's arithmetic as a small C library, built on first use for the machine at hand."""
