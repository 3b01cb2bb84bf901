"""Tensor parallelism: one engine, several processes that each compute a part of the model."""
