"""What the caller of ``hvdkitrun`` did wrong, each with the exit status that says so to a script."""

from __future__ import annotations

USAGE_STATUS = 2
NOT_EXECUTABLE_STATUS, NOT_FOUND_STATUS = 126, 127  # the shell's numbers


class LaunchError(ValueError):
    """The job cannot be started; the message says why and what to do."""

    status = 1


class UsageError(LaunchError):
    """The command line, the host string or the host file cannot be meant."""

    status = USAGE_STATUS


class CommandNotFoundError(LaunchError):
    """The program to start does not exist here."""

    status = NOT_FOUND_STATUS
