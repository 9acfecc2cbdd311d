"""``hvdkitrun``: start the ranks of a job, carry their output, and leave none behind when a rank fails."""

USAGE_STATUS = 2
NOT_EXECUTABLE_STATUS, NOT_FOUND_STATUS = 126, 127  # the shell's numbers


class LaunchError(ValueError):
    """A job that cannot be started; the message says why and what to do. ``status`` is hvdkitrun's exit status."""

    status = 1


class UsageError(LaunchError):
    """A mistake in the command line, the host string or the host file."""

    status = USAGE_STATUS


class CommandNotFoundError(LaunchError):
    """A program that does not exist on this machine."""

    status = NOT_FOUND_STATUS
