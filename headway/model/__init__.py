"""Models: configs, weights, and one decoder for all supported architectures."""

import os

# Settings of torch and its threads. They have an effect only if torch is not loaded yet.
# Weights and keys are read sequentially, and small memory pages make that 10% slower.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Waiting threads must sleep. Spinning threads on a busy machine take CPU time from the work that
# they wait for, and a step of 80 ms then takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
