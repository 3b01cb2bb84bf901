"""Drafters of speculative decoding: they propose tokens that may follow those of a request."""
