"""The paged KV cache as the scheduler sees it: block pools, prefix keys, allocations."""
