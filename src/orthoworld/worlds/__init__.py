"""Worlds: latents, transitions, mixings."""
