"""A fleet on Ray: processes, deployments, addresses and scaling."""
