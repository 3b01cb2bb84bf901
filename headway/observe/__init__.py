"""What a run shows of itself: traces, timelines, explanations, metrics and spans."""
