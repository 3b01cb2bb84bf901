"""Tool calls: how tools are shown to a model, and how its calls are parsed."""
