"""Models: what they are in numbers, their weights, and one decoder for all of them."""

import os

# Switches of torch and its threads; they count only if torch has not been loaded before.
# Weights and keys are read end to end, and small pages cost a tenth of that.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Threads that wait must sleep: spinning, they keep a busy machine from the very work they wait for,
# and a step that takes 80 ms then takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
