"""``import horovod.torch`` gives hvdkit: for scripts that nobody wants to edit, whether or not Horovod is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# The release whose API this is; scripts compare it.
HOROVOD_VERSION = "0.28.1"

# The folder that hvdkitrun --as-horovod puts first on PYTHONPATH: its package horovod calls install().
FOLDER = Path(__file__).with_name("horovod_path")

_ADAPTERS = ("compression", "functions", "mpi_ops", "sync_batch_norm")
# What scripts import of Horovod, and the module of hvdkit that it is.
MODULES = {
    **{f"horovod.torch{name}": f"hvdkit.torch{name}" for name in ("", *(f".{one}" for one in _ADAPTERS), ".optimizer")},
    **{f"horovod.tensorflow{name}": f"hvdkit.tensorflow{name}" for name in ("", *(f".{one}" for one in _ADAPTERS))},
    "horovod.tensorflow.keras": "hvdkit.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hvdkit.tensorflow.keras.callbacks",
    "horovod.keras": "hvdkit.keras",
    "horovod.keras.callbacks": "hvdkit.keras.callbacks",
    "horovod.common": "hvdkit.api",
    "horovod.common.exceptions": "hvdkit.errors",
    "horovod.common.process_sets": "hvdkit.engine.process_sets",
    "horovod.common.util": "hvdkit.api.horovod_util",
}
_HINTS = {
    "elastic": "hvdkit has no elastic jobs: it starts again from a checkpoint.",
    "run": "start the job with hvdkitrun, which has horovodrun's flags.",
    "runner": "start the job with hvdkitrun, which has horovodrun's flags.",
}


def install(in_place_of: ModuleType | None = None) -> None:
    """From now on ``import horovod`` and its parts give hvdkit's in this process. A second call does nothing.

    ``in_place_of``: a module that already goes by the name. Raises RuntimeError where another Horovod was imported
    before.
    """
    known = sys.modules.get("horovod")
    if isinstance(known, _Horovod):
        return
    if known is not in_place_of:
        raise RuntimeError(
            f"hvdkit.install_as_horovod(): {getattr(known, '__file__', 'horovod')} was imported before.\n"
            "HINT: call it first in the program, or start the job with hvdkitrun --as-horovod."
        )
    sys.modules["horovod"] = _Horovod()
    sys.meta_path.insert(0, _Finder())


class _Horovod(ModuleType):
    """The package ``horovod``."""

    def __init__(self) -> None:
        super().__init__("horovod", __doc__)
        self.__version__ = HOROVOD_VERSION
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        hint = f"\nHINT: {_HINTS[name]}" if name in _HINTS else ""
        raise AttributeError(f"horovod is hvdkit here, which has no horovod.{name}{hint}")


class _Finder(MetaPathFinder, Loader):
    """Finds modules of Horovod's names before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            hint = _HINTS.get(fullname.rpartition(".")[2], "import it from hvdkit, if hvdkit has it.")
            raise ModuleNotFoundError(f"horovod is hvdkit here, which has no {fullname}\nHINT: {hint}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run as what it is; its spec was replaced meanwhile."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state
