"""Requests, negotiation, fusion plans and the thread that drives them.

- Transport: tagged point-to-point messages of bytes, nonblocking (``isend``, ``irecv`` return a ``Transfer`` with
  ``done()`` and ``peer``), and small control messages in order per pair of ranks. A polling transport (MPI) is asked
  again and again; an event-driven one (Gloo) calls the engine's waker.
- Collectives are generators over a ``Group`` (a transport seen by some ranks): they post transfers and ``yield`` them;
  whoever drives resumes them when all are done. So an algorithm reads like straight code, many can be in flight at
  once, and what a stuck one waits for, rank by rank, is always known.
- A session (``engine/life/session``) is one rank's part in one job: transport, topology, settings, engine, from meeting
  the others to leaving them; a process may have several. ``engine/life/runtime`` has the one that ``hvd.init()`` made,
  which adapters ask for. What outlives sessions is the process's: how it ends (``engine/life/ending``, which replaces
  ``sys.exit`` and ``sys.excepthook`` to see why), how often its ranks have met (the names under which they do so must
  be new each time), and what a fork inherits.
- One engine per session. A background thread drives what is in flight. A thread that waits in ``synchronize()`` drives
  the engine itself, so a small synchronous operation costs no thread switch. A polling transport is polled without
  pause for a short time, then at growing intervals; when nothing is pending, every 10 ms.
- The coordinator is a pure state machine (``engine/loop/coordinator.py``): messages in, messages out, no clock and no
  socket of its own.
- What is wrong on one rank alone (``splits``) is told to the coordinator in place of the request, and fails the
  operation on all ranks at once.
- One name, one operation: a name is in flight once for each process set, whatever the kind of operation, so two kinds
  under one name are a mismatch at once. Ranks whose only thread waits tell the coordinator so five times a second; two
  that wait for each other in different operations of one name, in different process sets, or one of them in an
  optimizer's step, are a dead-lock and get an error.
- The end of a process (``engine/life/ending.py``): a rank that raises or exits with a code tells the others why and its
  exit code and, under MPI, ends the job with that code; one that ends because another failed leaves that one the time
  to do so, and then ends the job with the same code.
- The last wait: ``shutdown()`` waits five seconds for the others' goodbyes. It asks those that are missing for a sign
  of life meanwhile. A rank that answers, also at the end, may have much to do before it leaves, and is left alone; one
  that is lost, by the rules below, is raised by ``shutdown()``.
- Lost or late? Whoever waits for a rank asks its engine thread for an answer, and looks whether it beats. No answer and
  no beat within ``HVDKIT_TIMEOUT_SECONDS`` means lost: every waiting rank gets a ``HorovodInternalError`` that names
  it. A rank that beats but does not answer has a library that keeps Python's lock (GIL), or threads that wait for each
  other: it is lost after ``HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS`` (ten times as long). A rank that answers but has not
  submitted is late: that is a stall warning. Who did not look for half of the timeout himself (stopped, or without the
  lock) blames nobody for it (``engine/telemetry/liveness``).
- Beats (``transports/node/heartbeat``, ``csrc/heartbeat``): a thread of C++ counts at least four times a second in the
  node's memory; a stopped or killed process has no thread that runs, and a fork does not have it. MPI and Gloo answer
  only to Python, so ranks of different nodes beat over TCP connections of their own, a byte each time, and with one
  rank a node that is the only way to tell a stopped rank from one that is busy. Each rank has one to the rank with its
  place on each other node and counts what comes in the memory of its node, for all there: nodes less one, where a
  connection for each pair of ranks would double the descriptors that Gloo takes. They are made at init, at an address,
  a port and a secret that travel over the transport; afterwards nobody listens. Where one cannot be made (a firewall),
  or nothing was compiled, that is said, and the rank there is lost when it does not answer within
  ``HVDKIT_TIMEOUT_SECONDS``.
- Forked children (``runtime``, ``engine/life/forked``): what is known about ranks is answered in them too
  (``runtime.topology``, ``process_sets``); whoever wants to communicate asks for ``runtime.engine()``, which raises
  ``ForkedChildError``. What a child inherits is never let go of, since its end would reach the parent's peers, and MPI
  is not finalised in it: it ends when Python lets go of its modules. A child of a rank alone may start a job of its
  own.
- Determinism: on the host, sums run in rank order and accumulate fp16 and bfloat16 in fp32, so every rank and every run
  holds the same bits, whichever fusion carried them. Over several nodes the sum of each node comes first, and in fp16
  and bfloat16 it is rounded to 16 bits for the wire; an average is scaled before, so that it cannot overflow there, but
  a sum can where the whole would not. ``ring``, ``tree`` and ``butterfly`` (only by name) sum in orders of their own.
- Averages are sums, divided: what happens to a sum at its end is one value from the operation to the kernel
  (``kernels.Scale``, a factor and a divisor). A rounded reciprocal would give other last bits, and 0 for an average of
  ones on 49 ranks. Where a product has the same bits it is one, as with powers of two, else it is a division in the
  same pass over memory. A scale factor of the user is one number with the divisor, rounded to the type of the
  arithmetic, as Horovod has it. A codec's sum is divided when it has been decoded.
- What every rank computes for itself (small tensors, decoded payloads, Adasum, low-rank products) must not depend on
  how its thread is set: a script may have it flush subnormal numbers to zero (``torch.set_flush_denormal``), and
  TensorFlow's threads do. Native kernels set how the processor computes when they begin, and set it back
  (``csrc/default_floats.h``); what numpy does is in a ``with kernels.DefaultFloats()``.
"""
