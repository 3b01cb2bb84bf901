"""Backends, which do the decoder's arithmetic: plain torch, C for CPUs, Triton for GPUs."""
