"""HTTP below the endpoints: connections, limits, bodies, errors and access control."""
