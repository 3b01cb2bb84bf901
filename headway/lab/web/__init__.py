"""The lab's web page: its API, a local server, and export to a single file."""
