"""Training: one loop for every experiment."""
