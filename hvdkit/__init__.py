"""hvdkit: Horovod's API on today's frameworks. Import ``hvdkit.torch``; this package itself imports nothing heavy."""

__version__ = "0.1.0"
