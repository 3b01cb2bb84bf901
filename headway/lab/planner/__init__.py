"""The planner: simulations that answer which settings, how much load and how many replicas."""
