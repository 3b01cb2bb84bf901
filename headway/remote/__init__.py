"""An engine behind a socket: one protocol for worker processes and for replicas."""
