"""What differs between the families of models, read from config.json and GGUF headers."""
