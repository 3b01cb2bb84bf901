"""Server processes: one or several, the sockets between them, logging and shutdown."""
