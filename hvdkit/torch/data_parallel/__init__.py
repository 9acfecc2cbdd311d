"""A communication hook for torch's DistributedDataParallel."""
