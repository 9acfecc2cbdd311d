"""Each processor runs its own version of the loops; all of them give the bits of the numpy twins.

The module that setup.py built takes the widest one that this processor has. What older processors run is compiled here
as the only version there is, and meets the same tests in a process of its own.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.kernels.arrays import needs_native
from tests.kernels.compiling import (
    ARENA,
    KERNELS,
    MEANING,
    NEEDS_PYTHON,
    TRANSPORTS,
    compile_all,
    run,
    some_compiler,
    sources_without_python,
)
from tests.ranks import ROOT

pytestmark = pytest.mark.thorough
TESTS = ["tests/kernels/test_native_agrees_with_numpy.py", "tests/kernels/test_codecs_agree_with_numpy.py"]


# By name: what is defined for the compiler, and what the processor must have.
VARIANTS = {
    "plain": (["-DHVDKIT_CLONES=", "-DHVDKIT_F16C=0", "-DHVDKIT_VECTOR_BITS=0"], set()),
    "avx2 and f16c": (
        ['-DHVDKIT_CLONES=__attribute__((target("avx2")))', "-DHVDKIT_VECTOR_BITS=256"],
        {"avx2", "f16c"},
    ),
}

# Puts a compiled module before the installed one, makes sure that the package took it, and runs the tests.
AGAINST = """
import importlib.util, sys
import pytest
path, *arguments = sys.argv[1:]
specification = importlib.util.spec_from_file_location("hvdkit.kernels._native", path)
native = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(native)
from hvdkit import kernels
assert kernels.reduce_into is native.reduce_into
raise SystemExit(pytest.main(arguments))
"""


def features_of_this_processor() -> set[str]:
    """As Linux names them; none where it is not Linux, or not x86."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    flags = re.search(r"^flags\s*:(.*)$", told, re.MULTILINE)
    return set(flags[1].split()) if flags else set()


def position_independent(compiler: str) -> list[str]:
    pybind11 = pytest.importorskip("pybind11")
    includes = [sysconfig.get_paths()["include"], pybind11.get_include()]
    return [compiler, *MEANING, "-fPIC", "-fvisibility=hidden", *(f"-I{folder}" for folder in includes)]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What is the same in all variants, compiled once: no loop of theirs comes in several versions."""
    command, folder = position_independent(some_compiler()), tmp_path_factory.mktemp("bindings")
    sources = [place / name for place in (KERNELS, TRANSPORTS, ARENA) for name in sorted(NEEDS_PYTHON)]
    sources = [source for source in sources if source.exists()] + sources_without_python(TRANSPORTS, ARENA)
    return compile_all([*command, "-O0"], sources, folder)


@needs_native  # where setup.py could build nothing, neither can we
@pytest.mark.parametrize(("definitions", "features"), VARIANTS.values(), ids=VARIANTS)
def test_a_version_for_older_processors_agrees_with_numpy(definitions, features, bindings, tmp_path):
    missing = features - features_of_this_processor()
    if missing:
        pytest.skip(f"this processor has no {' and no '.join(sorted(missing))}")
    command = [*position_independent(some_compiler()), "-O3", *definitions]
    objects = compile_all(command, sources_without_python(KERNELS), tmp_path)
    module = tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    linked = run([*command, "-shared", "-o", str(module), *map(str, [*bindings, *objects])])
    assert linked.returncode == 0, linked.stderr
    names = module.read_bytes()
    assert b".resolver" not in names, "several versions, of which one is chosen when it is loaded"
    assert (b"widen_float16_f16c" in names) is ("f16c" in features)
    assert (b"select_avx2" in names) is ("avx2" in features)
    arguments = ["-q", "-p", "no:cacheprovider", *(str(ROOT / tests) for tests in TESTS)]
    tested = run([sys.executable, "-c", AGAINST, str(module), *arguments], 240.0)
    assert tested.returncode == 0, tested.stdout[-8000:] + tested.stderr
    assert re.search(r"^[1-9]\d* passed in ", tested.stdout, re.MULTILINE), tested.stdout  # and none skipped
