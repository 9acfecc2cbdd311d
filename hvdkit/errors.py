"""The exceptions for what a peer or the network did wrong. For a caller's mistakes, ValueError and TypeError serve."""

import multiprocessing
from collections.abc import Sequence


def in_words(error: BaseException) -> str:
    """Return an exception as Python prints it, without the module of its class; its HINT keeps a line of its own."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def cut_off(text: str, longest: int) -> str:
    """Return a text of at most ``longest`` characters; a shortened text says that it is cut off."""
    return text if len(text) <= longest else f"{text[:longest]} ... (cut off here)"


def abridged(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` of some names, and the count of the rest: "a, b, c and 5 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


class HorovodInternalError(RuntimeError):
    """A collective operation that failed on every rank that took part; the message names the tensor and the ranks.

    Raised by every wait for it: an operation, ``synchronize()``, an optimizer's ``step()``. The classes below say more.
    What to do: correct a program whose ranks asked for operations that do not go together; the job can go on, since no
    optimizer steps on half a sum. If ranks may have trained apart, broadcast the state of one, or load a checkpoint.
    """

    ag_pass_through = True  # TensorFlow's autograph would raise an exception of its own in place of this one


class MismatchError(HorovodInternalError):
    """Operations, or steps of an optimizer, of several ranks that do not go together.

    Raised on every rank; the message says what each rank asked for. What to do: make the ranks ask for the same, with
    the same shapes and dtypes; the job can go on.
    """


class DuplicateNameError(HorovodInternalError, ValueError):
    """A name that was submitted again while its first operation is in flight.

    Raised on the rank that submitted it. What to do: synchronise the first operation before, or use other names.
    """


class _PeerError(HorovodInternalError):
    """A lost or failed rank. Raised as one of the classes below. What to do: see there."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(_PeerError):
    """The loss of a rank that others wait for: it died, was cut off, or gave no sign of life before the deadline.

    Raised on every rank that waits for it, which ``HVDKIT_TIMEOUT_SECONDS`` limits. ``rank`` is the lost rank, or None
    if it is unknown. What to do: look at its output, and start the job again from its last checkpoint.
    """


class PeerFailedError(_PeerError):
    """A failed engine on another rank, which is alive: its codec raised, or Ctrl-C interrupted it.

    Raised on every other rank that waits, or makes its next call; on ``rank`` itself, the original exception is, or a
    HorovodInternalError caused by it. What to do: correct what the message says, and start the job again.
    """


class StallError(HorovodInternalError):
    """An operation that some ranks did not submit in time; these ranks are alive.

    The time is ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, in a process group of ``torch.distributed`` its timeout. Raised
    on the ranks that wait; the message names the tensor or operation, and the late ranks. What to do:
    have all ranks call the same operations equally often, or ``hvd.join()`` where a rank has less data.
    """


class PayloadError(HorovodInternalError):
    """A compressed payload that ``rank`` sent and that arrived damaged; ``problem`` is the damage.

    Raised on the rank that received it; the others raise PeerFailedError, and the job ends. What to do: run the same
    version of hvdkit on all ranks; if you do, suspect memory or network of that rank.
    """

    def __init__(self, rank: int, problem: str, what: str = "") -> None:
        super().__init__(
            f"{what}the compressed payload of rank {rank} is damaged: {problem}.\n"
            "HINT: run the same version of hvdkit on all ranks; if you do, check the memory and the network of "
            f"rank {rank}."
        )
        self.rank, self.problem = rank, problem


class ParametersDifferError(HorovodInternalError):
    """Parameters that differ between ranks that train one model; the message names them, the ranks and the step.

    Raised by all ranks of the set at the same step. What to do: broadcast those of one rank, or load a checkpoint.
    """


class ForkedChildError(HorovodInternalError):
    """A collective call in a process that was forked from a rank; only the rank can make such calls.

    Raised in that process alone. What to do: let child processes return data to the rank, and make the call there.
    """

    def __init__(self, rank: str, process: int) -> None:
        super().__init__(
            f"this process was forked from {rank}, process {process}, whose connections and memory it must not use: "
            "hvd.rank(), hvd.size() and similar functions work here, but nothing is communicated.\n"
            "HINT: make collective calls and optimizer steps in the process that called hvd.init(); let workers of a "
            "DataLoader and other child processes return data to that process."
        )


class NotInitializedError(ValueError):
    """An operation that was called before ``hvd.init()`` or after ``hvd.shutdown()``.

    A ValueError, as in Horovod. Raised by that call. What to do: call ``hvd.init()`` first, once in every process.
    """

    ag_pass_through = True  # see HorovodInternalError

    def __init__(self) -> None:
        hint = "call hvd.init() once in every process before any other hvd function."
        if multiprocessing.parent_process() is not None:
            hint += (
                " Do not call it in the child processes of a rank: children that multiprocessing starts anew (spawn, "
                "forkserver) do not know the rank; give them hvd.rank() as an argument, or start them by fork."
            )
        super().__init__(f"Horovod has not been initialized; use hvd.init().\nHINT: {hint}")


class NotConnectedError(NotInitializedError):
    """An operation in a process of an elastic job that is not connected to the other ranks yet.

    ``hvd.init()`` connects nothing there, so that a new process loads its program while the others train. Raised by
    that call. What to do: make such calls inside the function that ``hvd.elastic.run`` decorates.
    """

    def __init__(self) -> None:
        ValueError.__init__(
            self,
            "This process of an elastic job is not connected to the other ranks yet.\n"
            "HINT: move the call into the function that @hvd.elastic.run decorates; state.sync() broadcasts the state.",
        )


class UnsupportedReductionError(ValueError, NotImplementedError):
    """A reduction that the called function does not support.

    A RuntimeError, too, as in Horovod. Raised before anything is sent. What to do: use a reduction that is listed.
    """

    ag_pass_through = True  # see HorovodInternalError


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (the name that elastic Horovod scripts catch)
    """A change of hosts while an elastic job runs; ``skip_sync``: True if state need not be synchronised.

    Raised by ``state.commit()`` and ``state.check_host_updates()`` on all ranks at the same call, and caught by
    ``hvd.elastic.run``. What to do: let it pass.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class EnvironmentConflictError(ValueError):
    """Variables of a launcher that are half set, or variables of two launchers that contradict each other.

    Raised by ``hvd.init()``. What to do: unset the variables that the message names, or start with a single launcher.
    """


class TransportUnavailableError(RuntimeError):
    """A chosen transport that cannot run here; the message says what is missing and how to get it.

    Raised by ``hvd.init()``. What to do: install what is missing, see ``hvdkit doctor``, or choose another transport.
    """


class AuthenticationError(TransportUnavailableError):
    """A peer that does not know the job's secret in the place of a rank; nothing that it sent was used.

    Raised by ``hvd.init()``. What to do: give all ranks the same ``HVDKIT_SECRET_FILE``, as ``hvdkitrun`` does.
    """
