"""Faults that strike a rank at random moments, and what counts as the right end of such a job: pure decisions."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

# In the order in which a job comes by them.
MOMENTS = ("init", "broadcast", "first step", "allreduce", "checkpoint", "shutdown")
KINDS = ("killed", "stopped", "raises", "slow", "full disk", "launcher killed")
# A rank that meets its end between two of the others' looks: up to so many seconds after the moment has come.
LONGEST_DELAY_SECONDS = 0.05
SLOW_SECONDS = 2.0
RIGHT_STATUS = 0
# From a kill until all know it; and what a deadline may be exceeded by: those who wait look every so often, and their
# machine may have other things to do.
KILL_SECONDS = 10.0
SLACK_SECONDS = 8.0
# From then on until nothing of the job runs: what cannot end itself is ended after ten of them.
END_SECONDS = 20.0
# Between the last operation, which needs all ranks, and the word of a rank that it leaves.
SAME_MOMENT_SECONDS = 2.0


@dataclass(frozen=True)
class Fault:
    """``rank`` does, or suffers, ``kind`` so many seconds after it has come to ``moment``."""

    kind: str
    moment: str
    rank: int
    delay: float

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Fault:
        fault = cls(**json.loads(text))
        assert fault.kind in (*KINDS, "none", "cut")
        assert fault.moment in MOMENTS
        return fault

    @property
    def is_survived(self) -> bool:
        """Whether the job shall go on as if nothing had happened."""
        return self.kind in ("none", "slow", "full disk")


def random_faults(seed: int, ranks: int, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Faults without end: every kind at every moment before any comes again, in random order."""
    chance = random.Random(seed)
    while True:
        pairs = list(itertools.product(kinds, MOMENTS))
        chance.shuffle(pairs)
        for kind, moment in pairs:
            yield Fault(kind, moment, chance.randrange(ranks), chance.uniform(0, LONGEST_DELAY_SECONDS))


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as seen from outside. Times are seconds of the machine's monotonic clock."""

    status: int | None  # of the launcher; None: it did not end
    output: str
    ended: float
    left_behind: Sequence[str] = ()


@dataclass(frozen=True)
class Verdict:
    """``problems`` is empty where all is well; ``noticed_after`` is None where nobody had anything to notice."""

    problems: tuple[str, ...]
    noticed_after: float | None
    message: str


def latest(fault: Fault, timeout_seconds: float, start_timeout_seconds: float) -> float:
    """Seconds from the fault within which it must have been noticed."""
    if fault.kind not in ("stopped", "cut"):
        return KILL_SECONDS
    return SLACK_SECONDS + (max(timeout_seconds, start_timeout_seconds) if fault.moment == "init" else timeout_seconds)


def judge(fault: Fault, outcome: Outcome, ranks: int, timeout_seconds: float, start_timeout_seconds: float) -> Verdict:
    """Whether a job with these deadlines ended as it must after ``fault``."""
    struck = re.search(r"STRIKES ([\d.]+)", outcome.output)
    noticed = {int(rank): text for rank, _, text in _told("NOTICED", outcome.output)}
    times = [float(seconds) for _, seconds, _ in _told("NOTICED", outcome.output)]
    ended_well = {int(rank) for rank, _, _ in _told("ENDED WELL", outcome.output)}
    survivors = set(range(ranks)) - {fault.rank}
    problems = [f"left behind: {what}" for what in outcome.left_behind]
    if outcome.status is None:
        problems.append("it did not end")
    if "WRONG" in outcome.output:
        problems.append("a sum was wrong")
    if struck is None and fault.kind != "none":
        problems.append("the fault did not strike")
    words = ""
    if fault.is_survived:
        if ended_well != set(range(ranks)) or outcome.status != RIGHT_STATUS:
            problems.append(f"only ranks {sorted(ended_well)} ended well")
        words = _warning(fault, outcome.output)
        # Whoever is late to come or to leave keeps no operation waiting.
        is_told = fault.kind == "full disk" or (fault.kind == "slow" and fault.moment not in ("init", "shutdown"))
        if is_told and not words:
            problems.append("nobody was warned")
        return Verdict(tuple(problems), None, words)
    if fault.kind != "launcher killed":
        if outcome.status == RIGHT_STATUS:
            problems.append("the launcher says that all was well")
        words = _blaming(fault.rank, [text for rank, text in noticed.items() if rank in survivors], outcome.output)
        if fault.moment == "init":  # MPI, or PyTorch's store, may wait without end and does not say for whom
            words = words or _last_resort(outcome.output)
        if not words:
            problems.append(f"nobody named rank {fault.rank}")
        # Who has come to its end needs nobody any more, and may not even have heard.
        leaving = {
            int(rank)
            for rank, at, _ in _told("LEAVING", outcome.output)
            if struck and float(at) <= float(struck[1]) + SAME_MOMENT_SECONDS
        }
        wrongly_well = (ended_well & survivors) - leaving
        if wrongly_well:
            problems.append(f"ranks {sorted(wrongly_well)} ended as if nothing had happened")
    after = None
    if struck is not None:
        # Where the launcher ended the others before they could speak, they noticed when it did.
        after = max([*times, *([] if times else [outcome.ended])]) - float(struck[1])
        limit = latest(fault, timeout_seconds, start_timeout_seconds)
        if after > limit:
            problems.append(f"noticed after {after:.1f} s, later than {limit:g} s")
        if outcome.ended - float(struck[1]) > limit + END_SECONDS:
            problems.append(f"ended {outcome.ended - float(struck[1]):.1f} s after the fault")
    return Verdict(tuple(problems), after, words)


def _told(word: str, output: str) -> list[tuple[str, str, str]]:
    """What ranks said: (rank, seconds, text)."""
    return re.findall(rf"RANK (\d+) {word} ([\d.]+) ?(.*)", output)


def _blaming(rank: int, noticed: Sequence[str], output: str) -> str:
    """The first thing that a survivor, or the launcher, said of this rank: not one that it only takes part in."""
    lost = rf"\brank {rank}\b( \([^)]*\))? (is lost|gave |has left)|(?<!its )connection to rank {rank}\b"
    lost += rf"|the first to leave was rank {rank}\b"
    missed = rf"(missing:|for ranks) \[[^]]*\b{rank}\b"
    launcher = [line for line in output.splitlines() if re.match(rf"hvdkitrun: rank {rank} on ", line)]
    # In init(), which tells nobody else.
    silent = rf"missing: \[[^]]*\b{rank}\b|\brank {rank} did not say where "
    late = [line for line in output.splitlines() if re.search(silent, line)]
    return next((text for text in noticed if re.search(f"{lost}|{missed}", text)), "") or "".join(
        [*launcher, *late][:1]
    )


def _last_resort(output: str) -> str:
    why = "waited .* for MPI to (start|send)|got no reply from the |could not connect to all"
    told = rf"hvdkit: rank \d+ ({why}).*"
    where = r"Timeout .*!(?:\n.*)*? in (start_mpi|meet|_agents_store|__init__)"  # without the native part
    found = re.search(f"{told}|{where}", output)
    return found[0].replace("\n", " / ") if found else ""


def _warning(fault: Fault, output: str) -> str:
    patterns = {"slow": rf".*(not by ranks \[{fault.rank}\]|has waited for ranks \[).*", "full disk": r".*timeline.*"}
    found = re.search(patterns.get(fault.kind, "$^"), output)
    return found[0] if found else ""
