"""Command-line options that commands share."""
