"""Study and tune: workloads, cost models, simulation, comparison, replay."""
