"""The ready-made policies, one file for each slot, and the presets that combine them."""
