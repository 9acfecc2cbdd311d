"""A rank of tests/test_ranks.py: tells what it was given and ends as it is told."""

import json
import os
import signal
import sys
import time

how = sys.argv[1]
given = {"rank": os.environ.get("RANK"), "folder": os.getcwd(), "arguments": sys.argv[1:]}
own = {"pid": os.getpid(), "loaded": "pytest" in sys.modules, "hash": hash("a string")}
print(json.dumps({**given, **own}), flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    time.sleep(60)
sys.exit(int(how))
