"""The kernels' functions in plain torch, on any device: what the kernels are held to in tests."""
