"""Load generation: benchmark requests to a server, and reports of benchmarks."""
