"""The names of Horovod's API that do not depend on the framework; each adapter has them."""
# ruff: noqa: F405 (most of the names are those of job)

from hvdkit.api.gradients.guard import unsynchronized
from hvdkit.api.job import *  # noqa: F403
from hvdkit.compression import CustomCodec
from hvdkit.engine.session.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdkit.errors import HorovodInternalError, PayloadError, PeerFailedError, PeerLostError, StallError

__all__ = [
    "Average", "CustomCodec", "HorovodInternalError", "PayloadError", "PeerFailedError", "PeerLostError", "ProcessSet",
    "StallError", "Sum", "add_process_set", "ccl_built", "communication_stats", "compression_stats", "cross_rank",
    "cross_size", "ddl_built", "global_process_set", "gloo_enabled", "is_homogeneous", "is_initialized", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "rank", "remove_process_set", "shutdown", "size",
    "start_timeline", "stop_timeline", "unsynchronized",
]  # fmt: skip
