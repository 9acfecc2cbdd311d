"""The thread that drives what is in flight, and how ranks agree on it."""
