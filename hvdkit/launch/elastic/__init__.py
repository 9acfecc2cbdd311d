"""Jobs whose processes come and go: ``hvdkitrun --min-np 2 --max-np 4 python train.py``.

``membership`` decides, and neither reads a clock nor talks to anybody; ``driver`` tells it the events and carries out
its actions. The driver talks to an ``agent`` on each host, which starts the processes there and ends them if it hears
nothing for the deadline. The agent of a host that joins by itself (``join``) connects to the ``listener``.
"""
