"""The thread that drives what is in flight, how ranks agree on it, and what runs then."""
