"""``hvdkitrun``: start the ranks of a job, carry their output, and leave none behind when a rank fails."""


class LaunchError(ValueError):
    """A job that cannot be started; the message says why and what to do. ``status`` is hvdkitrun's exit status."""

    status = 1


class UsageError(LaunchError):
    """A mistake in the command line, the host string or the host file."""

    status = 2


class CommandNotFoundError(LaunchError):
    """A program that does not exist on this machine."""

    status = 127  # the shell's, which has 126 for a file that is not executable
