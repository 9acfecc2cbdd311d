"""What is told of what runs: timeline, statistics, who is late or lost, hashes of what is trained."""
