"""Several engines behind one client: routing, links to replicas, and resuming after faults."""
