"""The ranks of a job: their topology, process sets, and numbers assigned to all of them."""
