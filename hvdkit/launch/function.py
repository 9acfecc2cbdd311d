"""``hvdkit.run``: run a function on all ranks of a new job, and return its results.

The job is one of ``hvdkitrun``, a process of its own, so that it may be started from a notebook and from any thread.
The function travels to the ranks by the standard input of their workers; under mpirun, whose ranks run on this machine
then, in a file. Results come back as marked lines of output, over the same connections.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hvdkit.environments.failure_record import NOTE, RESULT, write_all
from hvdkit.launch import LaunchError
from hvdkit.launch.worker import FUNCTION

# Files of a call, the second with a rank behind it. The first two are in base 64.
FUNCTION_NAME, RESULT_NAME, FAILURE_NAME = "function", "result", "failure.json"
_CHUNK = 3 << 14  # bytes of a result in a line
_ENDING_SECONDS = 30.0  # for hvdkitrun to end all ranks after Ctrl-C


class RankFailedError(RuntimeError):
    """The failure of a rank in ``hvdkit.run``. ``rank`` is its rank, None if the job ended otherwise.

    The message has the traceback of the rank. What to do: correct the function.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` on every rank of a new job, and return the results in the order of ranks.

    The arguments are those of ``horovod.run``; they stand for the flags of hvdkitrun of the same names. Ctrl-C ends all
    ranks. What ranks print goes to ``sys.stdout`` and ``sys.stderr``, with the rank in front.

    Args:
        func: any function that cloudpickle can send. Modules that it imports must be there on all hosts.
        num_proc: the number of ranks, 1 by default; ``np`` is Horovod's older name.
        executable: the Python that runs the ranks, by default this one.

    Raises:
        RankFailedError: a rank failed. Its traceback is in the message.
        hvdkit.launch.LaunchError: the job could not be started.
        ValueError: arguments contradict each other.

    Examples:
        >>> def train(epochs):
        ...     import hvdkit.torch as hvd
        ...     hvd.init()
        ...     return hvd.rank() * epochs
        >>> hvdkit.run(train, args=(10,), np=2)
        [0, 10]
    """
    import cloudpickle  # the launcher, which keeps results by this module, does without

    if hosts is not None and hostfile is not None:
        raise ValueError("run(): both hosts and hostfile are given\nHINT: give one of them")
    if use_gloo and use_mpi:
        raise ValueError("run(): both use_gloo and use_mpi are given\nHINT: give one of them")
    flags = {
        "-np": num_proc or np or 1,
        "--min-np": min_num_proc or min_np,
        "--max-np": max_num_proc or max_np,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "-H": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": network_interface,
    }
    argv = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    switches = {"--gloo": use_gloo, "--mpi": use_mpi, "--verbose": verbose, "--disable-cache": disable_cache}
    argv += [flag for flag, is_on in switches.items() if is_on]
    argv += [] if mpi_args is None else [f"--mpi-args={mpi_args}"]  # which begins with a dash
    if cooldown_range is not None:
        argv += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    with tempfile.TemporaryDirectory(prefix="hvdkit-run-") as folder:
        content = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        Path(folder, FUNCTION_NAME).write_bytes(base64.b64encode(content))
        command = [executable or sys.executable, "-m", "hvdkit.launch.function"]
        _run_to_end([sys.executable, "-m", "hvdkit.launch", *argv, "--function-folder", folder, *command], folder)
        return _results(folder)


def _run_to_end(argv: list[str], folder: str) -> None:
    """Run hvdkitrun, with its output on that of this process. Raises RankFailedError, LaunchError."""
    process = subprocess.Popen(  # noqa: S603 (hvdkitrun)
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    last: list[str] = []
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=_copy, args=(source, sink, last), daemon=True) for source, sink in streams]
    for thread in threads:
        thread.start()
    try:
        status = process.wait()
    except BaseException:  # Ctrl-C
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
        process.kill()
        raise
    finally:
        for thread in threads:
            thread.join(_ENDING_SECONDS)
    if status == 0:
        return
    failure = Path(folder, FAILURE_NAME)
    if failure.exists():
        facts = json.loads(failure.read_text())
        raise RankFailedError(f"rank {facts['rank']} failed:\n{facts['traceback']}", facts["rank"])
    text = "\n".join(last[-20:])
    if status in (LaunchError.status + 1, 126, 127):  # a usage error, or no such program
        raise LaunchError(text)
    raise RankFailedError(f"the job ended with status {status}:\n{text}", None)


def _copy(source: IO[str], sink: Any, last: list[str]) -> None:
    for line in source:
        sink.write(line)
        sink.flush()
        if sink is sys.stderr:
            last.append(line.rstrip("\n"))


def _results(folder: str) -> list[Any]:
    import cloudpickle

    paths = sorted(Path(folder).glob(f"{RESULT_NAME}.*"), key=lambda path: int(path.suffix[1:]))
    contents = [base64.b64decode(path.read_bytes()) for path in paths]
    for rank, content in enumerate(contents):
        if not content:
            raise RankFailedError(f"rank {rank} ended before the function returned, by sys.exit() or os._exit()", rank)
    # These bytes came from ranks that hvdkitrun has started, over its own pipes and ssh connections.
    return [cloudpickle.loads(content) for content in contents]


def keep_results(folder: Path, results: Mapping[int, bytes], size: int) -> None:
    """Write the result of each rank, in base 64, into the folder of the call: nothing where a rank sent none."""
    for rank in range(size):
        Path(folder, f"{RESULT_NAME}.{rank}").write_bytes(results.get(rank, b""))


def keep_failure(folder: Path, rank: int, traceback: str) -> None:
    """Write the failure of a rank into the folder of the call."""
    Path(folder, FAILURE_NAME).write_text(json.dumps({"rank": rank, "traceback": traceback}))


def main() -> None:
    """Run the function in a rank, and send its result to the launcher."""
    import cloudpickle

    with open(os.environ.pop(FUNCTION), "rb") as file:
        func, args, kwargs = cloudpickle.loads(base64.b64decode(file.read()))
    result = cloudpickle.dumps(func(*args, **kwargs))
    sys.stdout.flush()
    sys.stderr.flush()
    for start in range(0, len(result), _CHUNK):
        chunk = base64.b64encode(result[start : start + _CHUNK]).decode()
        write_all(2, f"{NOTE}{RESULT} {chunk}\n".encode())


if __name__ == "__main__":
    main()
