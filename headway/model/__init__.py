"""Models: what they are in numbers, their weights, and one decoder for all of them."""

import os

# torch's own switch for huge pages: weights and keys are read end to end, and small pages cost a
# tenth of that. Only counts if torch has not allocated anything yet.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
