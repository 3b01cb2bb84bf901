"""Code shared by all generation endpoints: request fields, prompts, streams and logprobs."""
