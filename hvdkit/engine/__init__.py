"""Requests, their negotiation, planned gradients and the thread that drives them; see docs/architecture.md."""
