"""Tool calls: which tools a model is shown, how it calls them, and how its calls are read."""
