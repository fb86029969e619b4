"""Attention on Hopper cards with warps that copy and warps that compute, where that is faster.

Written in Gluon, Triton's lower-level language, of which every version of Triton has another one:
on versions, cards and calls that it was not measured on the kernel of `triton_forward` runs.
"""
