"""Ways to start the ranks: by mpirun, or a worker for each, here and over ssh."""
