"""``hvdkitrun`` with the flags of an elastic job: start it, and tell how it ended."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections.abc import Callable

from hvdkit import config
from hvdkit.launch.elastic.discovery import Discovery
from hvdkit.launch.elastic.driver import ElasticDriver
from hvdkit.launch.elastic.job import ElasticJob, ElasticOutcome, address_here
from hvdkit.launch.elastic.listener import Listener, read_secret
from hvdkit.launch.failures import exit_status, signal_name
from hvdkit.launch.function import keep_failure, keep_results
from hvdkit.launch.options import Options
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh, is_local
from hvdkit.launch.supervise import signals_as_bytes


def run_elastic(chosen: Options, environment: dict[str, str], say: Callable[[str], None]) -> int:
    """Run an elastic job and tell of its end. Return the exit status, that of the first process that failed at last."""
    assert chosen.elastic is not None
    elastic = chosen.elastic
    output = Output(elastic.limits.start, chosen.output_folder, chosen.timestamps, chosen.verbose, is_elastic=True)
    elsewhere = elastic.limits.hosts_may_change or not all(is_local(host.name) for host in chosen.hosts)
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
    with signals_as_bytes() as wake:
        listener = None
        if elastic.listen is not None:
            host, port = elastic.listen
            secret = read_secret(elastic.secret_file, may_create=True)
            listener = Listener(
                (host or job.own_address, port), secret, lambda: os.kill(os.getpid(), signal.SIGCHLD), say
            )
            address, port = listener.address
            if ipaddress.ip_address(address).is_unspecified:
                address = job.own_address
            say(f"hosts join with: hvdkitrun --join {address}:{port} --secret-file {elastic.secret_file}")
            if not chosen.hosts and elastic.script is None:
                say("waits for hosts to join; with -H localhost:1 a process runs on this host too")
        outcome = ElasticDriver(job, source, wake, listener).run()
    output.close()
    return report(job, outcome)


def report(job: ElasticJob, outcome: ElasticOutcome) -> int:
    """Tell how the job ended. Return the exit status."""
    output, folder = job.output, job.options.function_folder
    if outcome.signal is not None:
        job.say(f"ended all processes after {signal_name(outcome.signal)}")
        return exit_status(-outcome.signal)
    if not outcome.reason:
        if folder is not None:
            results = {end.rank: output.results[end.process] for end in outcome.ends}
            keep_results(folder, results, len(results))
        return 0
    failed = next((end for end in outcome.ends if end.code), None)
    is_told = failed is not None and failed.process in output.failures.records
    output.failures.show_rest(failed.process if failed is not None and is_told else None, job.options.output_folder)
    if failed is None:
        job.say(f"the job ended: {outcome.reason}")
        return 1
    if folder is not None:
        keep_failure(folder, failed.rank, output.failures.tracebacks.get(failed.process) or outcome.reason)
    # The words and the form by which Horovod's users and their scripts know the end of a job.
    job.say(
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: {failed.process}\nExit code: {failed.code}"
    )
    job.say(f"the job ended: {outcome.reason}")
    return exit_status(failed.code)
