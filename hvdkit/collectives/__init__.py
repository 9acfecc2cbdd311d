"""Algorithms: generators that move and reduce flat buffers over a group of ranks."""
