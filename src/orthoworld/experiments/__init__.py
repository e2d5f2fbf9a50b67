"""Experiments: which runs there are, and how one is carried out."""
