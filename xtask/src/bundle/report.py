#!/usr/bin/env python3
"""Prints tables of what the calls of a lease have found: `report.py results.jsonl…`.

The first table has each sentence about CUDA in docs/guarantees.md. It is confirmed if all that lease.json names for it
has passed on a real GPU, refuted if something of it has failed, and otherwise not tried. The others have launches and
synchronizations beside those of the real host code on null CUDA, what was measured, and what has not passed.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ABOUT_CUDA = re.compile(r"GPU|CUDA|NCCL|H100|\bdevices?\b|synchroniz|stream|kernel")
SKIPPED = re.compile(r"SKIPPED (\S+): ")
SHOWN = 5  # differences of a test
TAIL = 12  # lines of a program that has not passed

# In the order in which one decides over another.
REFUTED, NOT_TRIED, CONFIRMED = "refuted", "not tried", "confirmed"
OUTCOMES = {"passed": CONFIRMED, "failed": REFUTED, "crashed": REFUTED}


def sentences(page):
    """The sentences of a page in Markdown, without titles and definitions of links."""
    for block in re.split(r"\n\s*\n|\n(?=- |#)", page.split("<!-- generated")[0]):
        text = " ".join(block.split()).removeprefix("- ")
        if text.startswith("#") or re.match(r"\[[^]]*\]: ", text):
            continue
        for sentence in re.split(r"(?<=[.:!?*])\s+(?=[A-Z\[`])", text):
            if not re.fullmatch(r"\*\*[^*]*\*\*", sentence):
                yield sentence


def claims_of(page, plan):
    """The sentences about CUDA among those that hold, and what is to show each of them."""
    by = [(claim["begins"], claim["by"]) for claim in plan["claims"]]
    for sentence in sentences(page.split("## What is not tested")[0]):
        found = [names for begins, names in by if sentence.startswith(begins)]
        if found or ABOUT_CUDA.search(sentence):
            yield sentence, [name for names in found for name in names]


def verdicts_of(results):
    """What each step and each test of a suite has shown."""
    verdicts = defaultdict(set)
    for result in results:
        step, suite = result["step"], result["step"].split(" ")[0]
        not_run = set(SKIPPED.findall("\n".join(result.get("skipped", []))))
        outcome = OUTCOMES.get(result["status"], NOT_TRIED)
        verdicts[step].add(NOT_TRIED if outcome == CONFIRMED and step.split(" ")[-1] in not_run else outcome)
        if suite.startswith("tests/"):
            for outcome, tests in ((CONFIRMED, result.get("passed", [])), (REFUTED, result.get("failures", []))):
                for test in tests:
                    verdicts[f"{suite} {test}"].add(NOT_TRIED if test in not_run else outcome)
    return verdicts


def verdict_of(names, verdicts):
    """The verdict over a sentence, and which of the names have passed. A name that ends with `::` is a whole module."""
    seen, passed = set(), 0
    for name in names:
        fits = (lambda other: other.startswith(name)) if name.endswith("::") else (lambda other: other == name)
        of_name = set().union(*(verdict for other, verdict in verdicts.items() if fits(other)))
        verdict = next((each for each in (REFUTED, NOT_TRIED, CONFIRMED) if each in of_name), NOT_TRIED)
        # Of a module, those count that could run.
        if name.endswith("::") and verdict == NOT_TRIED and CONFIRMED in of_name:
            verdict = CONFIRMED
        seen.add(verdict)
        passed += verdict == CONFIRMED
    verdict = next((each for each in (REFUTED, NOT_TRIED, CONFIRMED) if each in seen), NOT_TRIED)
    return verdict, f"{passed} of {len(names)}: {', '.join(names)}" if names else "nothing in the lease"


def guarantees(page, plan, results):
    gpu = next((result["machine"]["gpu"] for result in results if result.get("machine", {}).get("gpu")), None)
    yield f"## Guarantees on {gpu or 'no GPU, so that nothing is confirmed'}\n"
    yield "| sentence | verdict | passed |"
    yield "|---|---|---|"
    verdicts = verdicts_of(results)
    for sentence, names in claims_of(page, plan):
        verdict, by = verdict_of(names, verdicts)
        yield f"| {sentence} | {verdict if gpu or verdict == REFUTED else NOT_TRIED} | {by} |".replace("::|", ":: |")


def differences(ours, theirs):
    """The parts of a test with other launches or synchronizations here than there."""
    numbers = {(place, nth): counts for _, place, nth, counts in theirs}
    for _, place, nth, (launches, waits, *_) in ours:
        there = numbers.get((place, nth))
        if there is None or there[:2] != [launches, waits]:
            yield f"{place}, time {nth}: {launches}, {waits}; {', '.join(map(str, there[:2])) if there else 'nothing'}"


def counts(version, expected, results):
    there = defaultdict(list)
    for row in expected:
        there[row[0]].append(row)
    here = defaultdict(list)
    for result in results:
        for row in result.get("counts", []):
            here[row[0]].append(row)
    yield "## Launches and synchronizations\n"
    if not expected:
        yield "The bundle has no counts of null CUDA to compare with.\n"
        return
    there_is = f"with libtorch {version} on null CUDA"
    yield f"| test | parts counted | parts that differ | launches, synchronizations here; {there_is} |"
    yield "|---|---|---|---|"
    here.pop("", None)  # of threads of a test, whose lines are in no order
    for test, rows in sorted(here.items()):
        differing = list(differences(rows, there[test]))
        yield f"| {test} | {len(rows)} | {len(differing)} | {'<br>'.join(differing[:SHOWN])} |"


def measured(results):
    yield "## Measured\n"
    for result in results:
        if result.get("machine"):
            yield f"    {json.dumps(result['machine'])}"
        lines = result.get("end", "").splitlines() if "--bench" in result["step"] else result.get("measured", [])
        if lines:
            yield f"{result['step']}: {result['status']} in {result['seconds']} s\n"
            yield from (f"    {line}" for line in lines)
            yield ""


def not_passed(results):
    yield "## Not passed\n"
    for result in results:
        if result["status"] != "passed":
            yield f"- {result['step']}: {result['status']} after {result['seconds']} s"
            yield from (f"  - {failure}" for failure in result.get("failures", []))
            yield from (f"      {line}" for line in result.get("end", "").splitlines()[-TAIL:])
    yield f"\n{sum(result['status'] == 'passed' for result in results)} of {len(results)} steps passed."


def read(path):
    """The lines of JSON in a file, without one that was cut."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"a line of {path.name} is cut", file=sys.stderr)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    plan = json.loads((ROOT / "lease.json").read_text())
    page = (ROOT / "docs/guarantees.md").read_text()
    results = [result for name in sys.argv[1:] for result in read(Path(name))]
    path = next(ROOT.glob("counts-*.jsonl"), ROOT / "counts-none.jsonl")
    version, expected = path.stem.removeprefix("counts-"), list(read(path))
    compared = counts(version, expected, results)
    for part in (guarantees(page, plan, results), compared, measured(results), not_passed(results)):
        print("\n".join(part) + "\n")


if __name__ == "__main__":
    main()
