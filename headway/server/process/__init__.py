"""How a server runs: one process or several, sockets between them, logs and shutdown."""
