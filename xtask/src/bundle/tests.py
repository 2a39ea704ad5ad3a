"""Tests of run.py and report.py with programs that pass, fail, crash and hang."""

import contextlib
import importlib.util
import io
import json
import os
import re
import stat
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]

PROGRAMS = {
    "passing": "echo 'test a::holds ... ok'; echo 'ulps AdamW: 0: 5'; echo 'SKIPPED a::holds: no reason'",
    "failing": "echo 'test a::holds ... FAILED'; exit 101",
    "crashing": "kill -SEGV $$",
    # With a child that does not end by itself either.
    "hanging": "trap '' TERM; sh -c \"sleep 60; : $0\" & sleep 60",
    "listing": 'case "$1$2" in --list*) printf "b::one: test\\nb::two: test\\nb::process: test\\n";; *process) '
    "echo 'test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured';; *) "
    "echo \"[\\\"$2\\\", \\\"f.rs:1\\\", 1, [4, 0, 0, 0]]\" > $TCH_AMP_COUNTS; [ $2 = b::one ];; esac",
    "telling": "echo \"$LD_PRELOAD $GIVEN\"; exit 1",
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


run, report = load("run"), load("report")


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        run.ROOT = Path(folder.name)
        (run.ROOT / "bin/tests").mkdir(parents=True)
        for name, text in PROGRAMS.items():
            path = run.ROOT / "bin/tests" / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_all(self, *stages, budget=60, has_gpu=False, jobs=None):
        machine = SimpleNamespace(env=dict(os.environ), has_gpu=has_gpu)
        self.out = run.ROOT / "out"
        with contextlib.redirect_stdout(io.StringIO()):
            self.code = run.Runner(machine, self.out, budget, jobs).run_all([run.Stage(**stage) for stage in stages])
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text().splitlines()]

    def test_what_fails_crashes_and_hangs_does_not_keep_the_rest_from_running(self):
        names = ["failing", "crashing", "hanging", "missing", "passing"]
        for jobs in (1, 3):
            start = time.monotonic()
            lines = self.run_all({"steps": [f"tests/{name}" for name in names], "timeout": 1, "jobs": jobs})
            self.assertLess(time.monotonic() - start, 20)
            found = {line["step"]: line["status"] for line in lines}
            expected = ("failed", "crashed", "out of time", "failed", "passed")
            self.assertEqual(found, {f"tests/{name}": status for name, status in zip(names, expected)})
            self.assertEqual(self.code, 1)
        passed = next(line for line in lines if line["status"] == "passed")
        self.assertEqual((passed["passed"], passed["measured"]), (["a::holds"], ["ulps AdamW: 0: 5"]))
        self.assertIn("does not start", next(line["end"] for line in lines if "missing" in line["step"]))
        self.assertIn("===== tests/hanging: out of time", (self.out / "output.log").read_text())

    def test_nothing_of_a_program_is_left_when_its_time_is_over(self):
        self.run_all({"steps": ["tests/hanging"], "timeout": 1})
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
        self.assertFalse([command for command in commands if str(run.ROOT).encode() in command])

    def test_as_many_programs_run_at_a_time_as_may(self):
        stage = {"steps": ["tests/hanging"] * 3, "timeout": 1, "jobs": 3}
        for jobs, runs_together in ((None, True), (1, False)):
            start = time.monotonic()
            self.run_all(stage, jobs=jobs)
            self.assertEqual(time.monotonic() - start < 3, runs_together)

    def test_a_call_ends_in_time_and_says_what_it_has_not_run(self):
        start = time.monotonic()
        lines = self.run_all({"steps": ["tests/hanging", "tests/hanging", "tests/passing"], "timeout": 60}, budget=2)
        self.assertLess(time.monotonic() - start, 6)
        self.assertEqual([line["status"] for line in lines], ["out of time", "not run", "not run"])

    def test_nothing_follows_what_is_required_and_has_not_passed(self):
        first = {"steps": ["tests/failing", "tests/passing"], "required": True}
        lines = self.run_all(first, {"steps": ["tests/passing"]})
        self.assertEqual([line["status"] for line in lines], ["failed", "passed", "not run"])

    def test_each_test_of_a_program_is_a_process_with_its_counts(self):
        lines = self.run_all({"steps": ["tests/listing"], "each": True})
        found = [(line["step"], line["status"], line["counts"][0][0]) for line in lines]
        expected = [("tests/listing b::one", "passed", "b::one"), ("tests/listing b::two", "failed", "b::two")]
        self.assertEqual(found, expected)

    def test_libraries_are_preloaded_on_a_real_gpu_alone(self):
        stage = {"steps": ["tests/telling"], "preload": ["counters"], "env": {"GIVEN": "here"}}
        for has_gpu in (False, True):
            (line,) = self.run_all(stage, has_gpu=has_gpu)
            self.assertIn("here", line["end"])
            self.assertEqual("libcounters.so" in line["end"], has_gpu)


def result(step, status="passed", **more):
    return {"step": step, "status": status, "seconds": 1, **more}


class Reports(unittest.TestCase):
    page = "# Guarantees\n\n- **A.** It holds on a\n  GPU. This holds\n  anywhere.\n- **B.** Nothing synchronizes.\n"
    plan = {"claims": [{"begins": "It holds on a GPU.", "by": ["tests/a x::one", "tests/b y::"]}]}
    gpu = result("python machine.py", machine={"gpu": "a GPU"})

    def verdicts(self, *results):
        rows = list(report.guarantees(self.page, self.plan, results))[3:]
        return {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in rows}

    def test_a_sentence_is_confirmed_by_all_that_it_names(self):
        a = result("tests/a", passed=["x::one"])
        b = result("tests/b y::two")
        self.assertEqual(
            self.verdicts(self.gpu, a, b),
            {"It holds on a GPU.": "confirmed", "Nothing synchronizes.": "not tried"},
        )
        self.assertEqual(self.verdicts(self.gpu, a)["It holds on a GPU."], "not tried")
        self.assertEqual(self.verdicts(a, b)["It holds on a GPU."], "not tried", "there is no GPU")

    def test_a_failure_refutes_and_what_did_not_run_shows_nothing(self):
        a, b = result("tests/a", passed=["x::one"]), result("tests/b y::two", "crashed")
        self.assertEqual(self.verdicts(self.gpu, a, b)["It holds on a GPU."], "refuted")
        failed = result("tests/a", "failed", passed=["x::two"], failures=["x::one"])
        self.assertEqual(self.verdicts(self.gpu, failed)["It holds on a GPU."], "refuted")
        for status in ("out of time", "not run"):
            cut = result("tests/b y::two", status)
            self.assertEqual(self.verdicts(self.gpu, a, cut)["It holds on a GPU."], "not tried")
        skipped = result("tests/a", passed=["x::one"], skipped=["SKIPPED x::one: no GPU"])
        self.assertEqual(self.verdicts(self.gpu, skipped, result("tests/b y::two"))["It holds on a GPU."], "not tried")

    def test_counts_are_compared_part_by_part(self):
        expected = [["t", "f.rs:1", 1, [4, 0, 1, 1]], ["t", "f.rs:1", 2, [5, 0, 1, 1]]]
        here = [["t", "f.rs:1", 1, [4, 0, 9, 9]], ["t", "f.rs:1", 2, [5, 1, 1, 1]], ["t", "f.rs:2", 1, [1, 0, 0, 0]]]
        row = list(report.counts("2.13", expected, [result("tests/s t", counts=here)]))[-1]
        self.assertEqual(row, "| t | 3 | 2 | f.rs:1, time 2: 5, 1; 5, 0<br>f.rs:2, time 1: 1, 0; nothing |")

    def test_a_line_that_was_cut_is_left_out(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.jsonl"
            path.write_text('{"step": "a"}\n{"step": "b')
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(list(report.read(path)), [{"step": "a"}])
            self.assertIn("is cut", said.getvalue())

    def test_no_step_and_no_claim_is_stale(self):
        plan = json.loads((HERE / "lease.json").read_text())
        found = list(report.sentences((REPOSITORY / "docs/guarantees.md").read_text()))
        steps = [step for call in plan["calls"] for stage in call["stages"] for step in stage["steps"]]
        for claim in plan["claims"]:
            fits = [sentence for sentence in found if sentence.startswith(claim["begins"])]
            self.assertEqual(len(fits), 1, claim["begins"])
            for name in claim["by"]:
                suite, test = name.split(" ")
                self.assertTrue(any(step.split(" ")[0] == suite for step in steps), f"no step has {suite}")
                self.assert_there(suite, test)
        # A step whose module is gone would run nothing, and pass.
        for words in map(str.split, steps):
            suites = [at for at, word in enumerate(words) if word.startswith("tests/")]
            for part in words[suites[0] + 1 :] if suites else []:
                if "::" in part:
                    self.assert_there(words[suites[0]], part)

    def assert_there(self, suite, part):
        module, _, function = part.rpartition("::")
        module = REPOSITORY / suite / module.replace("::", "/")
        source = next((file for file in (module.with_suffix(".rs"), module / "mod.rs") if file.is_file()), None)
        self.assertIsNotNone(source, part)
        self.assertTrue(re.search(rf"\bfn {function}\b" if function else "", source.read_text()), part)


if __name__ == "__main__":
    unittest.main()
