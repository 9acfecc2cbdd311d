"""The rendezvous of the ranks of the ``torch`` transport, and their authentication. SECURITY.md has the threat model.

- ``rendezvous`` finds the store by each launcher's own way; ``store`` is rank 0's own store, for processes that prove
  the job's secret.
- ``listening`` chooses the one address on which a rank listens, alike on all ranks of a host.
- ``admission`` brings the ranks of one attempt to start the job together, whatever dead ranks left in the store. The
  ranks' fresh nonces and the job's secret give the secret of the session.
- ``credentials`` are HMACs over the job, the generation and a label, so that nothing can be shown twice or elsewhere.
  The session's secret seals what Gloo reads at the store (``sealed_store``), and each connection begins with a proof of
  fixed length, before the first byte that is parsed. Lengths are checked before memory is taken.
"""
