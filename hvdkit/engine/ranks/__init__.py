"""Who the ranks are and where: topology, process sets, places in the memory of a node."""
