"""Sessions and their engine: from the introduction of the ranks over joins and lost ranks to the end of the process."""
