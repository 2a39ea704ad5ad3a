#!/usr/bin/env python3
"""Runs what this bundle holds. It needs this Python with torch @TORCH@, and nothing of Rust.

Programs run beside each other (--jobs), each for a limited time (--timeout), and the whole run ends in time (--budget):
what fails, crashes or hangs is reported, and the others run. Results appear as they come: a line of JSON for each program
in results.jsonl, and its output in a log beside it.

--preload second_device shows the only GPU a second time, for tests of two; --preload counters counts on a real GPU what
the suite `simulated` compares. Both may be given.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

TORCH = "@TORCH@"
ROOT = Path(__file__).resolve().parent
KINDS = ("tests", "examples", "bench")
FAILED = re.compile(r"^test (.+) \.\.\. FAILED$", re.MULTILINE)
PASSED = re.compile(r"^test result: \w+\. (\d+) passed", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED.*$", re.MULTILINE)


def arguments():
    after = "Words after -- are arguments for each program."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=after, formatter_class=raw)
    parser.add_argument("kind", nargs="?", default="all", choices=(*KINDS, "all"))
    parser.add_argument("filter", nargs="?", default="", help="programs with one of these parts in their names: a,b")
    parser.add_argument("--without", default="", help="leaves out programs with one of these names: a,b")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time; benchmarks always run alone")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each program")
    parser.add_argument("--budget", type=float, default=86400, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="the folder for results and logs")
    parser.add_argument("--preload", action="append", default=[], choices=("second_device", "counters"))
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:at])
    options.rest = own[at + 1 :]
    return options


def environment():
    """What programs need to find libtorch, Python and the files of the crate."""
    import torch

    if torch.__version__.split("+")[0] != TORCH:
        sys.exit(f"error: this bundle needs torch {TORCH}, but {sys.executable} has {torch.__version__}")
    torch_folder = Path(torch.__file__).parent
    libraries = [torch_folder / "lib", *sorted((torch_folder.parent / "nvidia").glob("*/lib"))]
    env = dict(os.environ, TCH_AMP_PYTHON=sys.executable, TCH_AMP_REQUIRE_PYTHON="1", TCH_AMP_ROOT=str(ROOT))
    env["LD_LIBRARY_PATH"] = ":".join(map(str, libraries)) + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    if torch.cuda.is_available():
        env["TCH_AMP_REQUIRE_CUDA"] = "1"
    return env


def programs(options):
    parts, left_out = options.filter.split(","), options.without.split(",")
    for kind in KINDS if options.kind == "all" else (options.kind,):
        for path in sorted((ROOT / "bin" / kind).glob("*")):
            if any(part in path.name for part in parts) and path.name not in left_out:
                yield kind, path


def unpack():
    if not (ROOT / "bin").exists():
        with tarfile.open(ROOT / "bin.tar.xz") as archive:
            archive.extractall(ROOT)


class Runner:
    def __init__(self, options):
        self.options, self.env, self.lock = options, environment(), threading.Lock()
        self.end = time.monotonic() + options.budget
        preloads = [str(ROOT / "lib" / f"lib{name}.so") for name in options.preload]
        self.preload = {"LD_PRELOAD": ":".join(preloads)} if preloads else {}
        options.out.mkdir(parents=True, exist_ok=True)
        self.results = options.out / "results.jsonl"
        self.results.unlink(missing_ok=True)  # of an earlier run

    def command(self, kind, path):
        if kind == "bench" and "OMP_NUM_THREADS" not in os.environ and shutil.which("taskset"):
            # As `cargo xtask bench` does: one core for both sides.
            core = str(max(os.sched_getaffinity(0)))
            one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            return ["taskset", "-c", core, str(path), "--bench", *self.options.rest], one
        return [str(path), *(["--bench"] if kind == "bench" else []), *self.options.rest], {}

    def run(self, kind, path):
        """Runs one program in a process group of its own, so that nothing of it is left when its time is over."""
        seconds = min(self.options.timeout, self.end - time.monotonic())
        name, start = f"{kind}/{path.name}", time.monotonic()
        log = self.options.out / f"{kind}-{path.name}.log"
        if seconds < 1:
            return self.report({"program": name, "status": "not run"}, log)
        command, more = self.command(kind, path)
        env = {**self.env, **self.preload, **more}
        with open(log, "wb") as output:
            child = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            for stop in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, stop)
                except ProcessLookupError:
                    break
                time.sleep(0.2)
            child.wait()
        text = log.read_text(errors="replace")
        result = {
            "program": name,
            "status": "out of time" if status is None else "passed" if status == 0 else "failed",
            "exit": status,
            "seconds": round(time.monotonic() - start, 1),
            "passed": sum(map(int, PASSED.findall(text))),
            "failures": FAILED.findall(text),
            "skipped": SKIPPED.findall(text),
        }
        self.report(result, log)

    def report(self, result, log):
        with self.lock:
            with open(self.results, "a") as lines:
                lines.write(json.dumps(result) + "\n")
            counts = f"{result.get('passed', 0)} passed, {len(result.get('failures', []))} failed"
            print(f"{result['status']:<12} {result['program']:<32} {result.get('seconds', 0):>7} s  {counts}", flush=True)
            for failure in result.get("failures", []):
                print(f"             {failure}", flush=True)
            if self.options.kind == "bench" and log.exists():
                print(log.read_text(errors="replace"), flush=True)

    def work(self, queue):
        while True:
            with self.lock:
                if not queue:
                    return
                kind, path = queue.pop(0)
            self.run(kind, path)


def main():
    options = arguments()
    unpack()
    runner, queue = Runner(options), list(programs(options))
    alone = [one for one in queue if one[0] == "bench"]
    shared = [one for one in queue if one[0] != "bench"]
    for these, jobs in ((shared, options.jobs), (alone, 1)):
        workers = [threading.Thread(target=runner.work, args=(these,)) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    lines = runner.results.read_text().splitlines() if runner.results.exists() else []
    bad = [result["program"] for result in map(json.loads, lines) if result["status"] != "passed"]
    print(f"{len(lines) - len(bad)} passed, {len(bad)} did not")
    sys.exit(1 if bad or not lines else 0)


if __name__ == "__main__":
    main()
