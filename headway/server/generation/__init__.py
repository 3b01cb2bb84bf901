"""What all generation endpoints share: request fields, streams, stop strings, log probabilities."""
