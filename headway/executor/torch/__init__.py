"""Runs plans with torch."""

import headway.model  # noqa: F401  # sets torch's switches before torch is loaded
