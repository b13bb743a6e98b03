"""Blocks of Hopper kernels that know nothing of the delta rule."""

__all__ = ["CHUNK"]

CHUNK = 64  # rows of a product of one warpgroup, and tokens of a chunk
