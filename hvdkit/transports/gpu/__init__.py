"""Collectives and lossy codecs on tensors of a device.

- NCCL: under the ``torch`` transport, lanes and named allreduce, broadcast and allgather of CUDA tensors. Each lane and
  each process set has a process group of its own, since NCCL wants one order per communicator.
- Copies to the host and back (``engine/steps/device_reducer.py``): lanes of ranks that share a GPU, which NCCL refuses,
  lanes of the ``mpi`` transport, and lanes whose codec the device does not encode.
- Host memory, staged by the calling thread: everything else on CUDA, such as alltoall, reduce-scatter, Adasum, scaled
  integers, int16, and optimizers whose parameters are on several devices.

A CUDA graph cannot capture an operation: ``cuda_mark`` refuses. A capture in PyTorch's default mode also ends if
another thread queries an event, as the engine's thread does while an operation is in flight: capture when no operation
is, or with ``capture_error_mode="thread_local"``.
"""
