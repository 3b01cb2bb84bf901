"""The decoder's arithmetic on a GPU as Triton kernels, one file for each kind of operation.

tests/model/kernels/reference/ has the same functions in plain torch, which define the correct
results. Nothing here is imported before a GPU is used, because Triton may not be installed.
"""
