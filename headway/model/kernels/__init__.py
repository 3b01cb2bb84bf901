"""The decoder's arithmetic on a GPU as Triton kernels, one file for each kind of operation.

attention/ and products/ have most of them. The files here are what both use, norms and activations,
sampling, and the state of rows.

tests/model/kernels/reference/ has the same functions in plain torch, which define the correct
results. Nothing here is imported before a GPU is used, because Triton may not be installed.
"""
