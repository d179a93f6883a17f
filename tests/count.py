"""Counts the checks of one run: meson's testlog.json or pytest's JUnit file. Prints skipped tests with their reasons, then "PASSED FAILED" on the last
line. A program that crashed, or one that reports no counts, counts as one."""

import json
import re
import sys
import xml.etree.ElementTree

COUNTS = re.compile(r"^\d+%: Checks: (\d+), Failures: (\d+), Errors: (\d+)$", re.M)


def from_meson(path):
    passed = failed = 0
    with open(path, encoding="utf-8") as f:
        for line in f:
            test = json.loads(line)
            ok = test["result"] in ("OK", "EXPECTEDFAIL")
            if test["result"] == "SKIP":
                print(f"skipped: {test['name']}")
                continue
            text = test.get("stdout") or ""
            for reason in re.findall(r"^.*skipped:? .*$", text, re.M | re.I):
                print(f"{test['name']}: {reason}")
            bad = good = 0
            for checks, failures, errors in COUNTS.findall(text):
                bad += int(failures) + int(errors)
                good += int(checks) - int(failures) - int(errors)
            if not ok and not bad:
                bad = 1
            if ok and not good:
                good = 1
            passed += good
            failed += bad
    return passed, failed


def from_pytest(path):
    passed = failed = 0
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skipped is not None:
            print(f"skipped: {name}: {skipped.get('message')}")
        else:
            passed += 1
    return passed, failed


def main():
    path = sys.argv[1]
    passed, failed = from_pytest(path) if path.endswith(".xml") else from_meson(path)
    print(passed, failed)


main()
