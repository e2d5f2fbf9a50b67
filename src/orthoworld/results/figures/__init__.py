"""Figures: each a function from data to a matplotlib figure. Nothing here reads or writes files."""
