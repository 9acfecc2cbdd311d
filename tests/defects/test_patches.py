"""Every patch applies to the code as it is, and says what it is; make test-defects puts them in."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.defects.patches import FOLDER, Defect, all_defects
from tests.defects.run import Verdict, judge, table

ROOT = FOLDER.parents[1]
DEFECTS = all_defects()


def test_they_are_not_fewer_than_they_were() -> None:
    assert len(DEFECTS) >= 51
    assert sum(one.origin.startswith("revert of ") for one in DEFECTS) >= 23


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_patch_applies_and_names_tests_that_there_are(defect: Defect) -> None:
    # In a folder of another repository git would leave out what does not lie below that folder, which is everything.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    command = ["git", "apply", "--check", str(defect.path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [one for one in defect.tests if one.startswith("tests/")]
    assert files
    assert all((ROOT / one).exists() for one in files), files
    changed = re.findall(r"^\+\+\+ b/(\S+)", defect.path.read_text(), re.MULTILINE)
    assert changed
    assert all(one.startswith("hvdkit/") for one in changed), changed


def test_what_pytest_says_is_the_verdict() -> None:
    defect = DEFECTS[0]
    assert not judge(defect, 0, "1 passed").found
    found = judge(defect, 1, "...\nFAILED tests/a.py::test_b[c] - AssertionError\n")
    assert (found.found, found.by) == (True, "tests/a.py::test_b[c]")
    assert not judge(defect, 5, "3 deselected").found  # no test of it is left
    assert judge(defect, None, "").found
    assert judge(defect, -6, "corrupted size").by == "killed by signal 6"  # pytest itself
    with pytest.raises(SystemExit, match="ended with -15"):
        judge(defect, -15, "")
    with pytest.raises(SystemExit, match="ended with 2"):
        judge(defect, 2, "interrupted")


def test_the_score_tells_each_suite_beside_the_others() -> None:
    first, second = DEFECTS[:2]
    before = [Verdict(first.name, True, "tests/a.py::test_a"), Verdict(second.name, False, "")]
    after = [
        Verdict(first.name, True, "tests/a.py::test_a"),
        Verdict(second.name, True, "tests/b.py::test"),
    ]
    text = table([first, second], {"before": before, "after": after})
    assert "- before: 1 of 2 defects found" in text
    assert "- after: 2 of 2 defects found" in text
    assert f"| {second.origin} | **not found** | found | tests/b.py::test |" in text
