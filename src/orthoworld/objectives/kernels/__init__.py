"""Kernels of the empirical characteristic function: the same two functions for each kind of device."""
