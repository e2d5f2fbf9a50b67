"""Objectives: alignment and what keeps an embedding Gaussian or white."""
