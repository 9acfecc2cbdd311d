"""Collectives and lossy codecs on tensors of a device.

Under the ``torch`` transport, lanes and named allreduce, broadcast and allgather of CUDA tensors go by NCCL, each lane
and each process set over a process group of its own (NCCL wants one order a communicator, and lanes are independent).
Lossy codecs: see above. Everything else on CUDA is staged in host memory: alltoall, reduce-scatter, Adasum, scaled
integers, int16; an optimizer whose parameters are on several devices; ranks that share a GPU, which NCCL refuses; and
the ``mpi`` transport.

- The engine knows no framework: a buffer of a device is opaque, and ``DeviceCollectives`` (``transports/base.py``)
  works on it. ``engine/steps/device_reducer.py`` reduces a lane's gradients there, floats and doubles in place by a
  coalesced allreduce, ``engine/ops/device_operations.py`` the named operations.
- An operation is launched as a whole on a stream of the group's own, behind the marks (CUDA events) of the threads that
  wrote its inputs, and is done when the host has seen the event at its end. So launches have the order of the lane, or
  of the coordinator, on every rank, and results may be read on any stream.
- Half precision and the fp16 codec: two phases (alltoall, sum in fp32 in rank order, allgather), since NCCL's own sum
  rounds to 16 bits each time. fp32 and fp64 are summed in NCCL's order: all ranks hold the same bits, but not those of
  the CPU.
- Deadlines are the engine's: the process groups have none (ten years), and NCCL's watchdog may end a communicator, not
  the process.
"""
