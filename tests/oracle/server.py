"""Runs oracles, each in a process that it forks: loading torch takes seconds, and is done once.

Each line of stdin is JSON: `script`, `args`, and the files `input` and `output`, which are the script's stdin and
stdout. The answer is a line with its exit status, negative if a signal has ended it.
"""

import json
import os
import runpy
import sys
import traceback

# Not used here: what each oracle would load, the second one with its first optimizer.
import torch  # noqa: F401
import torch._dynamo  # noqa: F401


def run(script, args, input, output):
    os.dup2(os.open(input, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def status_of(request):
    """The status with which Python would end."""
    try:
        run(**request)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def main():
    # What a script reads and writes is on other files than the requests and answers.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    for line in requests:
        child = os.fork()
        if child == 0:
            status = status_of(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), file=answers)


main()
