"""The decoder's arithmetic on a GPU, as Triton kernels: a small file for each family of them.

Each file has a twin of the same name in `twins/`: the same functions in plain torch, which say what
is right. Nothing here is imported before a GPU is asked for, since Triton may not be installed.
"""
