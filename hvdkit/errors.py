"""The exceptions: what a peer or the network did wrong. What the caller did wrong is ValueError or TypeError."""


class HorovodInternalError(RuntimeError):
    """A collective operation failed on every rank that took part; the message names the tensor and the ranks."""

    ag_pass_through = True  # TensorFlow's autograph would raise an exception of its own in place of this one


class DuplicateNameError(HorovodInternalError, ValueError):
    """A name was submitted again while its first operation is still in flight."""


class PeerLostError(HorovodInternalError):
    """A rank that others wait for has died, was cut off, or gave no sign of life before the deadline.

    ``rank`` is the lost rank where it is known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class StallError(HorovodInternalError):
    """Some ranks did not submit a tensor within ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``."""


class PayloadError(HorovodInternalError):
    """A compressed payload that ``rank`` sent did not arrive as it was sent."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(
            f"the compressed payload of rank {rank} is damaged: {problem}.\n"
            "HINT: run the same version of hvdkit on all ranks; if you do, suspect memory or network of that rank."
        )
        self.rank = rank


class NotInitializedError(ValueError):
    """An operation was called before ``hvd.init()`` or after ``hvd.shutdown()``."""

    ag_pass_through = True  # see HorovodInternalError

    def __init__(self) -> None:
        super().__init__(
            "Horovod has not been initialized; use hvd.init().\n"
            "HINT: call hvd.init() once in every process before any other hvd function."
        )


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (the name that elastic Horovod scripts catch)
    """The set of hosts changed while an elastic job runs; ``skip_sync`` tells whether state must be synchronised."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class EnvironmentConflictError(ValueError):
    """The environment describes a launcher only by half, or two launchers that contradict each other."""


class TransportUnavailableError(RuntimeError):
    """The chosen transport cannot run here; the message says what is missing and how to get it."""


class AuthenticationError(TransportUnavailableError):
    """Somebody who does not know the job's secret is where a rank should be; nothing that it sent was looked at."""
