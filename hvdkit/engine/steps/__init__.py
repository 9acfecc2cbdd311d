"""Planned gradients: layout, order and reduction of what an optimizer registers once."""
