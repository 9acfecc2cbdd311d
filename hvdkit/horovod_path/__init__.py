"""A folder for PYTHONPATH in which ``horovod`` is hvdkit; see hvdkit.as_horovod."""
