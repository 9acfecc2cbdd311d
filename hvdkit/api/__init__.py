"""What the adapters of all frameworks offer alike: the job and its ranks, and checks of what users pass."""
