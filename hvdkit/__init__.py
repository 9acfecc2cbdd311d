"""hvdkit: Horovod's API on today's frameworks. Import ``hvdkit.torch``; this package itself imports nothing heavy."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "run":  # loaded when it is asked for: ranks do without the launcher
        from hvdkit.launch.function import run

        return run
    raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")


def install_as_horovod() -> None:
    """Make ``import horovod.torch``, ``horovod.tensorflow`` and so on give hvdkit's modules in this process.

    Horovod need not be installed. A second call does nothing.

    Raises:
        RuntimeError: Horovod itself was imported before.

    Examples:
        >>> import hvdkit
        >>> hvdkit.install_as_horovod()
        >>> import horovod.torch
        >>> horovod.torch.size()
        2
    """
    from hvdkit.as_horovod import install

    install()
