"""Runs plans with torch."""
