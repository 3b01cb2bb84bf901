"""Read a model's weights from safetensors and GGUF files."""
