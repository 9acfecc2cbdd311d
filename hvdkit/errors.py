"""The exceptions: what a peer or the network did wrong. What the caller did wrong is ValueError or TypeError."""

import multiprocessing


def in_words(error: BaseException) -> str:
    """An exception as Python prints it, without the module of its class: its HINT stays on a line of its own."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def cut_off(text: str, longest: int) -> str:
    """A text of at most ``longest`` characters, which says so where there were more."""
    return text if len(text) <= longest else f"{text[:longest]} ... (cut off here)"


class HorovodInternalError(RuntimeError):
    """A collective operation failed on every rank that took part; the message names the tensor and the ranks.

    Raised by whatever waits for it: an operation, ``synchronize()``, an optimizer's ``step()``. The classes below say
    more. What to do: where ranks asked for what does not go together, as tensors of other shapes, mend the program;
    the job itself can go on, since no optimizer steps on half a sum. Where ranks may have trained apart, broadcast the
    state of one, or load a checkpoint. Where a rank is lost, end the job and start it again.
    """

    ag_pass_through = True  # TensorFlow's autograph would raise an exception of its own in place of this one


class MismatchError(HorovodInternalError):
    """Ranks asked for operations, or for steps of an optimizer, that do not go together.

    Raised on every rank; the message says what each asked for. What to do: make the ranks' programs ask for the same,
    with the same shapes and dtypes; the job can go on.
    """


class DuplicateNameError(HorovodInternalError, ValueError):
    """A name was submitted again while its first operation is still in flight.

    Raised where it was. What to do: synchronise the first one before, or give operations other names.
    """


class PeerLostError(HorovodInternalError):
    """A rank that others wait for has died, was cut off, or gave no sign of life before the deadline.

    Raised on every rank that waits for it: soon after its end, or once it has given no sign of life for
    ``HVDKIT_TIMEOUT_SECONDS``. What to do: look at the output of the lost rank, and start the job again from its last
    checkpoint, since this job has no such rank any more.

    Attributes:
        rank: the lost rank where it is known, or None.
    """

    rank: int | None = None

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailedError(HorovodInternalError):
    """The engine of another rank, which is not lost, cannot go on: its codec raised, or Ctrl-C came in the middle.

    Raised on every other rank that waits for something, or calls next; that rank itself raises what it was, or a
    HorovodInternalError with that as its cause. What to do: mend what the message says, and start the job again.

    Attributes:
        rank: whose engine has failed.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class StallError(HorovodInternalError):
    """Some ranks did not submit a tensor within ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``.

    Raised on the ranks that wait for it; the message names the tensor and the late ranks, which are alive. What to do:
    have all ranks call the same operations equally often, or ``hvd.join()`` where one has less data; raise the limit
    for ranks that may be so late.
    """


class PayloadError(HorovodInternalError):
    """A compressed payload that ``rank`` sent did not arrive as it was sent.

    Raised on the rank that received it; the others raise PeerFailedError, and the job ends. What to do: run the same
    version of hvdkit on all ranks; if you do, suspect memory or network of that rank.

    Attributes:
        rank: who sent it.
        problem: what is wrong with it.
    """

    def __init__(self, rank: int, problem: str, what: str = "") -> None:
        super().__init__(
            f"{what}the compressed payload of rank {rank} is damaged: {problem}.\n"
            "HINT: run the same version of hvdkit on all ranks; if you do, suspect memory or network of that rank."
        )
        self.rank, self.problem = rank, problem


class ParametersDifferError(HorovodInternalError):
    """Ranks that train one model hold different parameters; the message names these, the ranks and the step.

    Raised by all ranks of the process set at the same place, so that they can go back to a common state and train on,
    as scripts do that catch HorovodInternalError. What to do: a broadcast, or a checkpoint, brings them together.
    """


class ForkedChildError(HorovodInternalError):
    """A process that was forked from a rank made a collective call, which only that rank can make.

    Raised in that process alone. What to do: let children, as a DataLoader's workers, return data to the rank, which
    calls.
    """

    def __init__(self, rank: str, process: int) -> None:
        super().__init__(
            f"this process was forked from {rank}, process {process}, whose connections and memory it must not use: "
            "here hvd.rank(), hvd.size() and other questions about ranks are answered, but nothing is communicated.\n"
            "HINT: make collective calls, optimizer steps too, in the process that called hvd.init(); let workers of a "
            "DataLoader and other children return data to it."
        )


class NotInitializedError(ValueError):
    """An operation was called before ``hvd.init()`` or after ``hvd.shutdown()``.

    A ValueError, as Horovod raises. Raised where it was called. What to do: call ``hvd.init()`` once in every process
    before any other function of ``hvd``.
    """

    ag_pass_through = True  # see HorovodInternalError

    def __init__(self) -> None:
        hint = "call hvd.init() once in every process before any other hvd function."
        if multiprocessing.parent_process() is not None:
            hint += (
                " Not in the children of a rank: where multiprocessing starts them anew (spawn, forkserver) they know "
                "nothing of it; give them hvd.rank() as an argument, or have them forked."
            )
        super().__init__(f"Horovod has not been initialized; use hvd.init().\nHINT: {hint}")


class UnsupportedReductionError(ValueError, NotImplementedError):
    """A function was given a reduction that is not one of its own.

    A ValueError; and a NotImplementedError, so a RuntimeError too, which is what Horovod raised from its engine. Raised
    before anything is sent. What to do: take one of those that the message lists.
    """

    ag_pass_through = True  # see HorovodInternalError


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (the name that elastic Horovod scripts catch)
    """The set of hosts changed while an elastic job runs; ``skip_sync`` tells whether state must be synchronised.

    Never raised by hvdkit, whose jobs are not elastic: scripts that catch it can import it. What to do: nothing.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class EnvironmentConflictError(ValueError):
    """The environment describes a launcher only by half, or two launchers that contradict each other.

    Raised by ``hvd.init()``. What to do: unset the variables that the message names, or start the job by one launcher.
    """


class TransportUnavailableError(RuntimeError):
    """The chosen transport cannot run here; the message says what is missing and how to get it.

    Raised by ``hvd.init()``. What to do: install what is missing, or set ``HVDKIT_TRANSPORT`` to another one;
    ``hvdkit doctor`` looks for more.
    """


class AuthenticationError(TransportUnavailableError):
    """Somebody who does not know the job's secret is where a rank should be; nothing that it sent was looked at.

    Raised by ``hvd.init()``. What to do: give all ranks the same ``HVDKIT_SECRET_FILE``, as ``hvdkitrun`` does; see
    SECURITY.md.
    """
