"""What a model is: its sizes, its weights, where they come from, and how they compute."""
