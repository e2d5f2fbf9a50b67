"""Identifiability: how far an embedding is from an orthogonal map of the latents."""
