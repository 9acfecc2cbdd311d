"""Requests, negotiation, fusion plans and the thread that drives them."""
