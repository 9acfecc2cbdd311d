"""``hvdkitrun`` with the flags of an elastic job: start it, and tell how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from hvdkit import config
from hvdkit.launch import worker
from hvdkit.launch.elastic.discovery import Discovery
from hvdkit.launch.elastic.driver import ElasticDriver, ElasticOutcome
from hvdkit.launch.elastic.job import ElasticJob, address_here
from hvdkit.launch.function import keep_failure, keep_results
from hvdkit.launch.options import Options
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh, is_local


def run_elastic(chosen: Options, environment: dict[str, str], say: Callable[[str], None]) -> int:
    """Run an elastic job and tell of its end. Return the exit status, that of the first process that failed at last."""
    assert chosen.elastic is not None
    elastic = chosen.elastic
    output = Output(elastic.limits.start, chosen.output_folder, chosen.timestamps, chosen.verbose, is_elastic=True)
    elsewhere = elastic.script is not None or not all(is_local(host.name) for host in chosen.hosts)
    job = ElasticJob(
        chosen,
        elastic.limits,
        environment["HVDKIT_JOB"],
        environment,
        Ssh(chosen.ssh_port, chosen.ssh_identity_file, chosen.start_timeout),
        output,
        config.value_of("timeout_seconds", os.environ),
        address_here(chosen.interfaces, elsewhere),
        say,
    )
    hosts = {host.name: host.slots for host in chosen.hosts}
    source = hosts if elastic.script is None else Discovery(elastic.script, elastic.slots_per_host, say)
    with _signals() as wake:
        outcome = ElasticDriver(job, source, wake).run()
    output.close()
    return report(job, outcome)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Have signals arrive as bytes at a descriptor."""
    # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
    signals = [number for number in worker.STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *signals)}
    wake = worker.wake_on_signals(signals)
    try:
        yield wake
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(signal.set_wakeup_fd(-1))
        os.close(wake)


def report(job: ElasticJob, outcome: ElasticOutcome) -> int:
    """Tell how the job ended. Return the exit status."""
    output, folder = job.output, job.options.output_folder
    failures = output.failures
    if outcome.signal is not None:
        job.say(f"ended all processes after {signal.Signals(outcome.signal).name}")
        return 128 + outcome.signal
    if not outcome.reason:
        if job.options.function_folder is not None:
            results = {rank: output.results[number] for number, rank in outcome.finished.items()}
            keep_results(job.options.function_folder, results, len(results))
        return 0
    number, code = next(iter(outcome.failed.items()), (None, 1))
    if job.options.function_folder is not None and number is not None:
        keep_failure(job.options.function_folder, number, failures.tracebacks.get(number) or outcome.reason)
    failures.show_rest(number if number in failures.records else None, folder)
    if number is not None:
        # The words and the form by which Horovod's users and their scripts know the end of a job.
        job.say(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was:\nProcess name: {number}\nExit code: {code}"
        )
    job.say(f"the job ended: {outcome.reason}")
    return code if code >= 0 else 128 - code
