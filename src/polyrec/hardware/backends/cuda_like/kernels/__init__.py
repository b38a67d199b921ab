"""Triton kernels, one idea a file, each with the launch that picks its constants from shapes. Only these modules import triton.

They take tensors whose last dim is contiguous, check nothing and allocate nothing; `ops/` beside this does both. Constants
follow from the size of a row, so that a row's result does not depend on its batch; only products choose a tile by the number of
rows, in which each sum keeps its order. Those of a search have EARLY: they wait first and say when the next
may begin (`early`).
"""
