"""Collectives and lossy codecs on tensors of a device.

Under the ``torch`` transport, lanes and named allreduce, broadcast and allgather of CUDA tensors go by NCCL, each lane
and each process set over a process group of its own (NCCL wants one order a communicator, and lanes are independent).
Lanes of ranks that share a GPU, which NCCL refuses, of the ``mpi`` transport, and with codecs that the device does not
encode, are copied to the host and back (``engine/steps/copied_reducer.py``). Everything else on CUDA is staged in host
memory by the calling thread: alltoall, reduce-scatter, Adasum, scaled integers, int16, named operations without NCCL;
an optimizer whose parameters are on several devices.

- The engine knows no framework: a buffer of a device is opaque, and ``DeviceCollectives`` (``transports/base.py``)
  works on it. ``engine/steps/device_reducer.py`` reduces a lane's gradients there, floats and doubles in place by a
  coalesced allreduce, ``engine/ops/batch.py`` the named operations.
- An operation is launched as a whole on a stream of the group's own, behind the marks (CUDA events) of the threads that
  wrote its inputs, and is done when the host has seen the event at its end. So launches have the order of the lane, or
  of the coordinator, on every rank, and results may be read on any stream.
- Copies (``host_copies``) are between gradients and the lane's block in the node's memory, page-locked, on a stream of
  the lane's own: a bucket is copied when it is complete, beside the backward pass, so that no hook waits for the GPU;
  the node sums it in one pass where it lies; and it is copied back. What that gains is to be measured on a GPU: a
  blocking copy in each hook keeps the thread that launches kernels from running ahead.
- CUDA graphs capture what a thread launches, but not what the engine's thread does with it: ``cuda_mark`` refuses. A
  capture in PyTorch's default mode also ends where another thread asks for an event, as the engine's does while an
  operation is in flight: capture when none is, or with ``capture_error_mode="thread_local"``.
- Codecs that quantise are kernels of Triton (``triton_codecs``), one pass each for encoding with its residual and for
  decoding; top-k's selection (``triton_topk``) takes two. PyTorch's operations, which take about ten and dozens, are
  the fallback and the oracle in tests.
- Buckets of a device's own collectives have DistributedDataParallel's size: what the host measured of its own way says
  nothing about NCCL.
- Half precision and the fp16 codec: two phases (alltoall, sum in fp32 in rank order, allgather), since NCCL's own sum
  rounds to 16 bits each time. fp32 and fp64 are summed in NCCL's order: all ranks hold the same bits, but not those of
  the CPU.
- Deadlines are the engine's: the process groups have none (ten years), and NCCL's watchdog may end a communicator, not
  the process.
"""
