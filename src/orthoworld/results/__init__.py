"""Results: what was found, kept and shown."""
