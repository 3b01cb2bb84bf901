"""Run plans on a GPU."""
