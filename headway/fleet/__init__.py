"""Many replicas behind one client: routing, open requests, and what happens when a replica fails."""
