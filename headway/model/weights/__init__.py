"""Weights: safetensors and GGUF files, and random weights for benchmarks."""
