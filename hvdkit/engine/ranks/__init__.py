"""Who the ranks are and where: topology, process sets, segments of a node's memory."""
