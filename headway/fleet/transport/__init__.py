"""How a fleet finds its replicas and exchanges messages with them."""
