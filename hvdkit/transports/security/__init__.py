"""The rendezvous of the ranks of the ``torch`` transport, and their authentication. SECURITY.md has the threat model.

``rendezvous`` finds the ``store`` by each launcher's own way, ``admission`` brings the ranks of one attempt together
there, at addresses of ``listening``, and ``credentials`` begin each connection with a proof of fixed length, before the
first byte that is parsed. Lengths are checked before memory is taken. Ranks of Horovod's engine (``plugins/horovod``)
meet at the ``key_value_server``.
"""
