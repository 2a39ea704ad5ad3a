"""Ranks of a group, each a process on this machine."""

import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def ended(count, run):
    """Calls `run(rank, folder)` in a process for each rank. Yields the folder, which is theirs alone, when all have ended;
    ends this program if one has failed.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(count):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run(rank, folder)
                    status = 0
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            sys.exit("a rank failed")
        yield folder
