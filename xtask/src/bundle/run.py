#!/usr/bin/env python3
"""Runs what this bundle holds. It needs this Python with torch @TORCH@, and nothing of Rust.

Programs run beside each other (--jobs), each for a limited time (--timeout), and the whole run ends in time (--budget):
what fails, crashes or hangs is reported, and the others run. Two files are in the folder of the results: results.jsonl,
to which each program adds a line as it ends, and output.log with all that they print.

`run.py lease 1`, `lease 2` and `lease 3` are the calls of lease.json, for a GPU that is there for a short time: is all
right, how fast is it, and what do the sanitizer and NCCL say. `report.py` makes tables of their results.

--preload second_device shows the only GPU a second time, for tests of two; --preload counters counts on a real GPU what
the program `devices` compares. Both may be given.
"""

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "@TORCH@"
ROOT = Path(__file__).resolve().parent
KINDS = ("tests", "examples", "bench")
PASSED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. ok$", re.MULTILINE)
FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
IGNORED = re.compile(r"^test result: ok\. 0 passed; 0 failed; 1 ignored", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED.*$", re.MULTILINE)
# Lines with results, which tests and benchmarks print.
MEASURED = re.compile(r"^(?:ratio|ulps|share) .*$", re.MULTILINE)
LEASE_BUDGET = 550  # seconds of a call of 600, in which the bundle is unpacked, too
TAIL = 4000  # characters of the output, of a benchmark or of a program that has not passed


def arguments(words):
    after = "Words after -- are arguments for each program."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=after, formatter_class=raw)
    parser.add_argument("kind", nargs="?", default="all", choices=(*KINDS, "all", "lease"))
    parser.add_argument("filter", nargs="?", default="", help="programs with one of these parts in their names: a,b")
    parser.add_argument("--without", default="", help="leaves out programs with one of these names: a,b")
    parser.add_argument("--jobs", type=int, help="programs at a time, 1 by default; benchmarks always run alone")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each program")
    parser.add_argument("--budget", type=float, help=f"seconds for all of them; {LEASE_BUDGET} for a call of a lease")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="the folder for results and output")
    parser.add_argument("--preload", action="append", default=[], choices=("second_device", "counters"))
    parser.add_argument("--without-gpu", action="store_true", help="tries a lease where no real GPU is")
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    options.rest = words[at + 1 :]
    if options.budget is None:
        options.budget = LEASE_BUDGET if options.kind == "lease" else 86400
    return options


@dataclass
class Stage:
    """Programs that run beside each other. The next stage begins when all have ended."""

    steps: list
    jobs: int = 1
    timeout: float = 600
    preload: list = field(default_factory=list)
    env: dict = field(default_factory=dict)
    required: bool = False  # nothing follows a step that has not passed
    each: bool = False  # each test of a program is a process of its own


@dataclass
class Step:
    name: str
    command: list
    stage: Stage


class Machine:
    """What programs need to find libtorch, Python and the files of the crate."""

    def __init__(self):
        import torch

        if torch.__version__.split("+")[0] != TORCH:
            sys.exit(f"error: this bundle needs torch {TORCH}, but {sys.executable} has {torch.__version__}")
        torch_folder = Path(torch.__file__).parent
        libraries = [torch_folder / "lib", *sorted((torch_folder.parent / "nvidia").glob("*/lib"))]
        self.env = dict(os.environ, TCH_AMP_PYTHON=sys.executable, TCH_AMP_REQUIRE_PYTHON="1", TCH_AMP_ROOT=str(ROOT))
        self.env["LD_LIBRARY_PATH"] = ":".join(map(str, libraries)) + ":" + os.environ.get("LD_LIBRARY_PATH", "")
        self.has_gpu = self.counts_itself = False
        if torch.cuda.is_available():
            self.env["TCH_AMP_REQUIRE_CUDA"] = "1"
            # Null CUDA takes the place of libtorch_cuda and has counters of its own.
            self.counts_itself = hasattr(ctypes.CDLL(torch_folder / "lib/libtorch_cuda.so"), "simulated_cuda_kind")
            self.has_gpu = not self.counts_itself


def named(kind, options):
    """The stages with the programs of a kind, or of all."""
    parts, left_out = options.filter.split(","), options.without.split(",")
    steps = {True: [], False: []}
    for each in KINDS if kind == "all" else (kind,):
        for path in sorted((ROOT / "bin" / each).glob("*")):
            if any(part in path.name for part in parts) and path.name not in left_out:
                words = [f"{each}/{path.name}", *(["--bench"] if each == "bench" else []), *options.rest]
                pinned = each == "bench" and "OMP_NUM_THREADS" not in os.environ and shutil.which("taskset")
                # As `cargo xtask bench` does: one core for both sides.
                core = str(max(os.sched_getaffinity(0)))
                steps[each == "bench"].append(shlex.join(["taskset", "-c", core, *words] if pinned else words))
    one = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    shared = {"timeout": options.timeout, "preload": options.preload}
    # The tests of a whole program disturb each other. A step of a lease says where those of a module do.
    yield Stage(steps[False], jobs=options.jobs or 1, env={"RUST_TEST_THREADS": "1"}, **shared)
    yield Stage(steps[True], env=one, **shared)


def planned(call):
    """The stages of a call of the lease."""
    calls = json.loads((ROOT / "lease.json").read_text())["calls"]
    if not (call.isdecimal() and 1 <= int(call) <= len(calls)):
        sys.exit(f"error: the calls of a lease are 1 to {len(calls)}, as in `run.py lease 1`")
    return [Stage(**stage) for stage in calls[int(call) - 1]["stages"]]


def unpack():
    if (ROOT / "bin.tar.xz").exists() and not (ROOT / "bin").exists():
        with tarfile.open(ROOT / "bin.tar.xz") as archive:
            archive.extractall(ROOT)


class Runner:
    def __init__(self, machine, out, budget, jobs=None):
        self.machine, self.out, self.lock, self.jobs = machine, out, threading.Lock(), jobs
        self.end = time.monotonic() + budget
        self.statuses = []
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "output.log"):  # of an earlier run
            (out / name).unlink(missing_ok=True)

    def command(self, line):
        """A line of words, of which the names of programs are looked up in the bundle."""
        words = shlex.split(line)
        known = {"python": sys.executable}
        paths = {word: ROOT / "bin" / word for word in words}
        return [known.get(word, str(paths[word]) if paths[word].is_file() else word) for word in words]

    def environment(self, stage):
        env = {**self.machine.env, **stage.env}
        # Other devices than a real GPU count themselves.
        if stage.preload and self.machine.has_gpu:
            env["LD_PRELOAD"] = ":".join(str(ROOT / "lib" / f"lib{name}.so") for name in stage.preload)
        return env

    def steps(self, stage):
        for line in stage.steps:
            command = self.command(line)
            if not stage.each:
                yield Step(line, command, stage)
                continue
            listing = self.execute([*command, "--list", "--format", "terse"], self.environment(stage), 60)
            tests = re.findall(r"^(\S+): test$", listing["text"], re.MULTILINE)
            if not tests:
                self.report(Step(line, command, stage), listing)
            for test in tests:
                yield Step(f"{line} {test}", [*command, "--exact", test], stage)

    def execute(self, command, env, timeout):
        """Runs a command in a process group of its own, so that nothing of it is left when its time is over."""
        start, seconds = time.monotonic(), min(timeout, self.end - time.monotonic())
        if seconds < 1:
            return {"status": "not run", "exit": None, "seconds": 0, "text": ""}
        with tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return {"status": "failed", "exit": None, "seconds": 0, "text": f"{command[0]} does not start: {error}"}
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            for stop in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, stop)
                except ProcessLookupError:
                    break
                time.sleep(0.2)
            child.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        status = "out of time" if code is None else "passed" if code == 0 else "failed" if code > 0 else "crashed"
        return {"status": status, "exit": code, "seconds": round(time.monotonic() - start, 1), "text": text}

    def run(self, step):
        env = self.environment(step.stage)
        with tempfile.NamedTemporaryFile() as counts:
            if step.stage.each:
                env["TCH_AMP_COUNTS"] = counts.name
            ended = self.execute(step.command, env, step.stage.timeout)
            lines = Path(counts.name).read_text().splitlines()
        # A test that is ignored is a process of another one.
        if not (step.stage.each and IGNORED.search(ended["text"])):
            self.report(step, ended, [json.loads(line) for line in lines])

    def report(self, step, ended, counts=()):
        text = ended.pop("text")
        result = {
            "step": step.name,
            **ended,
            "passed": PASSED.findall(text),
            "failures": FAILED.findall(text),
            "skipped": SKIPPED.findall(text),
            "measured": MEASURED.findall(text),
        }
        if counts:
            result["counts"] = list(counts)
        if text.startswith("{") and result["status"] == "passed":
            result["machine"] = json.loads(text.splitlines()[0])
        if "--bench" in step.command or result["status"] not in ("passed", "not run"):
            result["end"] = text[-TAIL:]
        with self.lock:
            self.statuses.append(result["status"])
            with open(self.out / "results.jsonl", "a") as lines:
                lines.write(json.dumps(result) + "\n")
            with open(self.out / "output.log", "a") as log:
                log.write(f"===== {step.name}: {result['status']} in {result['seconds']} s\n{text}\n")
            numbers = f"{len(result['passed'])} passed, {len(result['failures'])} failed"
            print(f"{result['status']:<12} {step.name:<48} {result['seconds']:>6} s  {numbers}", flush=True)
            for line in (*result["failures"], *result["measured"]):
                print(f"             {line}", flush=True)

    def work(self, queue):
        while True:
            with self.lock:
                step = next(queue, None)
            if step is None:
                return
            try:
                self.run(step)
            except Exception as error:  # a fault of this script must not end the others
                text = f"{type(error).__name__}: {error}"
                self.report(step, {"status": "failed", "exit": None, "seconds": 0, "text": text})

    def run_stage(self, stage):
        """Returns whether the next stage may follow."""
        before = len(self.statuses)
        # A list, since a generator cannot be resumed after an exception.
        queue = iter(list(self.steps(stage)))
        jobs = min(stage.jobs, self.jobs or stage.jobs)
        workers = [threading.Thread(target=self.work, args=(queue,)) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return not stage.required or set(self.statuses[before:]) == {"passed"}

    def run_all(self, stages):
        """Returns the code to exit with."""
        stages = iter(stages)
        for stage in stages:
            if not self.run_stage(stage):
                print("what all else depends on has not passed, and nothing follows", flush=True)
                self.end = 0  # reports the rest as not run
        passed = self.statuses.count("passed")
        print(f"{passed} passed, {len(self.statuses) - passed} did not")
        return 0 if 0 < passed == len(self.statuses) else 1


def main():
    start = time.monotonic()
    options = arguments(sys.argv[1:])
    unpack()
    if options.without_gpu:
        os.environ.update(TCH_AMP_WITHOUT_GPU="1", TCH_AMP_BENCH_QUICK="1")
    machine = Machine()
    stages = planned(options.filter) if options.kind == "lease" else named(options.kind, options)
    budget = options.budget - (time.monotonic() - start)
    runner = Runner(machine, options.out, budget, options.jobs)
    sys.exit(runner.run_all(stages))


if __name__ == "__main__":
    main()
