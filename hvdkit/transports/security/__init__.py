"""Where the ranks of the ``torch`` transport meet, and who is let in.

- One store (``transports/security/meeting_store``), which rank 0 serves to processes that prove the job's secret; its
  port is closed when all ranks have connected. ``torchrun`` has its own, PyTorch's.
- One address: whoever opens a port binds it to one address (``transports/security/listening``): the store is given a
  socket that listens already, Gloo a device. Which one it is, all ranks of a host decide alike: the loopback if
  all ranks are known to be on one host, a named interface, what the meeting place's name stands for, or the way to the
  others.
- One attempt (``transports/security/attempt``): torchrun starts ranks anew where one dies, and the store of its agent
  keeps what the dead ones wrote; how often an agent has done so (``TORCHELASTIC_RESTART_COUNT``) differs between
  agents. So each attempt has a name, rank 0's fresh nonce, and all that ranks write stands under it. Each rank writes a
  nonce of its own there; rank 0 answers with a digest of all. A rank that follows a dead rank 0 finds no answer, or one
  that is not to its own nonce, and goes over to the next rank 0; a rank 0 that was only taken for dead sees its
  successor before it answers, and gives up.
- A secret of the job (``environments/network``): from ``hvdkitrun`` by the standard input of its workers, which keep it
  in a memory file that the rank opens by ``/proc``; under mpirun by MPI; else the user's file, or none.
- Proofs (``transports/security/credentials``, pure; ``transports/security/admission``): all HMACs are over the job, the
  generation and a label, so nothing can be shown twice or elsewhere. Each rank tells a nonce, and the secret of the
  session follows from all of them. The store seals with it what Gloo reads there; each connection begins with a proof
  of fixed length, before the first byte that is parsed.
- Lengths are looked at before memory is taken. SECURITY.md has the threat model, and what is not ours to close.
"""
