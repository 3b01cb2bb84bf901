"""Executors: they run the plans that the scheduler makes."""
