"""From meeting the others to leaving them: sessions, groups of ranks, and how processes end and fork."""
