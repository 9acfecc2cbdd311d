"""Codecs: what bytes stand for a gradient on the wire, and what is kept of what they do not carry.

- A codec is a frozen dataclass; its ``summary`` (name and parameters) is what ranks compare when they register a plan
  and what the timeline says. It is asked, never recognised: in which way what it makes is summed, what it keeps,
  whether it needs whole tensors, has momentum or a twin on devices. A built-in one is its file, a line in
  ``compression/registry.py``, and where it has kernels those and their numpy twins. A plan has several codecs, and each
  slot the number of one; a bucket has slots of one codec. The adapter's policy chooses
  (``api/gradients/compression_policy.py``): biases, norms and small tensors stay dense unless the user says otherwise.
- Where: a node's ranks sum densely where gradients lie; what each carries between nodes is encoded ("between_nodes").
  With "everywhere" each rank encodes its own, also on one node.
- How (``collectives/compressed.py``): in two phases each rank encodes the chunks of the others, the owner of a chunk
  sums in float32, encodes the sum, and hands it to all. Sparse payloads go to everyone at once where that sends no more
  (two ranks or nodes). PowerSGD sends vectors in two plain sums; its products are our own kernels, since all ranks
  compute them and must get the same bits. All ranks decode the same bytes.
- Error feedback: one residual for each element on each rank, in ``Memory``: of what it did not send to the owner, and
  on the owner, which sends itself nothing, of what it did not hand on. What was handed on plus all residuals is what
  came in.
- The same bits in every run: blocks, thresholds and residuals depend on what is encoded together, so buckets of lossy
  codecs are laid out by the order of registration (the last first) in sizes that nothing measured decides; only when
  they travel follows from what was observed. Operations by name that are encoded are never fused.
- State: ``optimizer.state_dict()["compression"]`` has what this rank keeps, and what a number in it is multiplied with
  to become part of the result. At the same place (rank, ranks, nodes, buckets, pieces, codec) a step goes on with the
  same bits; a state of other shapes is refused before anything is changed. Elsewhere, also when other parameters were
  frozen or a rank has left, all of it is one vector for each tensor (``State.owed``), which is added once to the next
  gradients of a rank that stays, on devices too; with DGC (``Codec.owes``) about as much arrives as its velocity would
  still have handed on, less what its ``clip`` takes. It counts as paid when it was added: it goes where that step goes,
  also if a GradScaler skips it, an exception ends it or another rank's gradients are not finite. What was kept of a
  parameter goes when that is frozen, and all of it with a step that fails or with ``hvd.shutdown()``.
- What is not finite is decoded as something not finite near it on all ranks, and leaves what is kept as it was.
- Payloads carry codec, elements, length and a checksum, which are looked at before anything else; a payload that
  arrives damaged is a ``PayloadError`` that names the sender, and ends the job with a message on all ranks. Casts are
  plain numbers and have no header.
- On CUDA (``transports/gpu/device_compression.py``): the same by torch's operations on the stream of the group, with
  payloads of sizes that all ranks know, so that the host never waits for a result. What is kept lives on the device;
  the memories of the host hold it while somebody reads or changes it. It is done where a rank encodes its own gradients
  (one rank a node, or "everywhere"); sums of nodes with several ranks, thresholds and codecs of one's own are encoded
  in host memory. On one node nothing is encoded, and gradients stay on the device.
- In DistributedDataParallel (``torch/data_parallel``): a hook with a session of its own (``group``), whose transport
  carries over Gloo connections among the ranks of the model's process group, each a node of its own; ``runtime`` has no
  part in it. The model is one lane (``gradients``), registered when its first step has shown all gradients, so what is
  encoded together does not depend on DDP's buckets, which it lays out anew. Buckets are offered as they come; one
  thread waits for the lane and ends their Futures.
"""

from hvdkit.compression.casts import CASTS, Cast
from hvdkit.compression.codec import Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.lossy import LinearCodec, LossyCodec
from hvdkit.compression.low_rank import PowerSGD
from hvdkit.compression.memory import Memory, Tally
from hvdkit.compression.payload import CustomCodec, PayloadCodec
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.registry import Codecs, codec_with_summary
from hvdkit.compression.sparse import Threshold, TopK

__all__ = [
    "CASTS",
    "DGC",
    "Cast",
    "Codec",
    "Codecs",
    "CustomCodec",
    "Int4",
    "Int8",
    "LinearCodec",
    "LossyCodec",
    "Memory",
    "OneBit",
    "PayloadCodec",
    "PowerSGD",
    "RandomK",
    "Tally",
    "Threshold",
    "TopK",
    "codec_with_summary",
]
