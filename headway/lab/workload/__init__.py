"""Workloads: request arrivals and lengths, from files or distributions."""
