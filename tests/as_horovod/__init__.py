"""Scripts of Horovod's users, as they are."""
