"""The documentation says what is there: generated tables, every public name on its page, every name of Horovod's."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit
from docs.hooks import address, code, figures, results, tables
from hvdkit import config
from hvdkit.api import missing_attribute
from hvdkit.as_horovod import MODULES
from hvdkit.compression import Codecs
from hvdkit.launch.options import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (DOCS.parent / "README.md").read_text()
PAGES = {"hvdkit.torch": "torch", "hvdkit.tensorflow": "tensorflow", "hvdkit.keras": "keras"}
CALLBACKS = "hvdkit.keras.callbacks"
PRESENT, OTHERWISE, ABSENT = "present", "differs", "absent"
# In a process of its own: several frameworks beside each other are nothing for others' ranks to be forked from.
LOOK = """
import importlib, json, sys
answers = {}
for module, names in json.load(sys.stdin).items():
    found = importlib.import_module(module)
    missing = {}
    for name in names:
        try:
            getattr(found, name)
        except AttributeError as error:
            missing[name] = str(error)
    answers[module] = {"all": list(getattr(found, "__all__", [])), "missing": missing}
print("LOOK", json.dumps(answers))
"""


@pytest.mark.parametrize("path", address.SHOWN)
def test_every_page_shows_the_address_of_the_repository_that_pyproject_has(path):
    assert set(address.shown(path)) == {address.address()}, "run python -m docs.hooks.address"


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in figures.pages()])
def test_the_figures_of_a_page_are_those_of_the_results(page):
    assert page.read_text() == figures.filled(page), "run: python -m docs.hooks.figures"


def test_every_figure_stands_on_a_page():
    assert {name for page in figures.pages() for name in figures.blocks(page)} == set(figures.BLOCKS)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("hvdkit torch topk", "**hvdkit on Gloo, top-k 1 %**"),
        ("hvdkit horovod mpi", "**hvdkit on Horovod's engine on MPI**"),
        ("Horovod mpi in place", "Horovod on MPI, in place"),
        ("mpi4py 2 links", "raw mpi4py, with two TCP connections"),
        ("hvdkit powersgd", "**hvdkit PowerSGD**"),
        ("torchft", "torchft"),
    ],
)
def test_readers_see_the_names_of_peers(name, shown):
    assert results.peer(name) == shown


def test_the_overview_names_each_peer_that_is_faster(monkeypatch):
    rows = {
        "allreduce of 4 KB": {"hvdkit on MPI": 0.5, "hvdkit on Gloo": 0.75, "DDP or Gloo": 1.0, "raw mpi4py": 0.25},
        "step": {"hvdkit on MPI": 0.75, "DDP or Gloo": 1.0, "compute alone": 0.5},
        "step on two hosts": {"hvdkit on MPI": 1.01, "hvdkit on Gloo": 1.1, "DDP or Gloo": 1.0, "Horovod on MPI": 1.5},
    }
    monkeypatch.setattr(figures, "measured", lambda: rows)
    lines = figures.overview().splitlines()
    assert lines[2] == "| allreduce of 4 KB | 0.50 | 0.75 | 1.00 | - | **0.25** | - |"
    assert lines[3] == "| step | **0.75** | - | 1.00 | - | - | 0.50 |"
    assert lines[4] == "| step on two hosts | 1.01 | 1.10 | **1.00** | 1.50 | - | - |"
    assert lines[-5:] == [
        "A peer was more than 2 % faster than hvdkit in these rows:",
        "",
        "- allreduce of 4 KB: raw mpi4py takes 0.50 of the time of hvdkit on MPI",
        "- allreduce of 4 KB: raw mpi4py takes 0.33 of the time of hvdkit on Gloo",
        "- step on two hosts: DDP takes 0.91 of the time of hvdkit on Gloo",
    ]


def test_the_summary_takes_the_better_of_hvdkits_transports(monkeypatch):
    rows = {
        "step on one host, small": {"hvdkit on MPI": 0.81, "hvdkit on Gloo": 0.75, "DDP or Gloo": 1.0},
        "step on one host, large": {"hvdkit on MPI": 0.9, "DDP or Gloo": 1.0},
        "step on two hosts, 1 Gb/s": {"hvdkit on MPI": 1.04, "hvdkit on Gloo": 1.02},
        "step on two hosts, 1 Gb/s, int8 beside DDP without a codec": {"hvdkit on MPI": 0.5},
        "step on two hosts, 10 Gb/s": {"hvdkit on MPI": 0.95, "hvdkit on Gloo": 0.99},
        "allreduce of 4 KB on one host, in place": {"hvdkit on MPI": 0.04},
    }
    monkeypatch.setattr(figures, "measured", lambda: rows)
    assert figures.summary().startswith(
        "On one host, a step of hvdkit takes 0.75 to 0.90 of the time of DDP's. On two hosts at 1 Gb/s it takes 1.02 "
        "without a codec and 0.50 with int8, and at 10 Gb/s 0.95 without a codec (the better of"
    )


def test_a_new_address_is_written_into_every_file_that_shows_it(tmp_path, monkeypatch):
    for path in address.SHOWN:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text((address.ROOT / path).read_text())
    (tmp_path / "pyproject.toml").write_text('Repository = "https://host/new"\n')
    monkeypatch.setattr(address, "ROOT", tmp_path)
    address.write()
    for path in address.SHOWN:
        assert set(address.shown(path)) == {"https://host/new"}
    assert "git+https://host/new'" in (tmp_path / "docs" / "start.md").read_text()


@pytest.mark.parametrize("folder", ["hvdkit", "examples", "docs", "benchmarks"])
def test_no_text_tells_users_to_install_hvdkit_from_a_package_index(folder):
    for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")):
        assert not re.search(r"pip\s+install\s+['\"]?hvdkit(?!\[[\w,]+\] @)", path.read_text()), path


def section(page: str, title: str) -> str:
    return re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", (DOCS / page).read_text(), re.M | re.S)[1]


def rows(title: str) -> dict[str, str]:
    """The names in the first column of a table of the migration guide, and what the second says of them."""
    lines = re.findall(r"^\| (`.*?) \| (\w+) \| .*\|$", section("migration.md", title), re.M)
    said = [(name, status) for names, status in lines for name in re.findall(r"`([\w-]+)`", names)]
    assert len(said) == len(dict(said)), "a name is there twice"
    assert {status for _, status in said} <= {PRESENT, OTHERWISE, ABSENT}
    return dict(said)


HOROVODS = {title: rows(title) for title in MODULES if f"### {title}\n" in (DOCS / "migration.md").read_text()}


@pytest.fixture(scope="module")
def modules() -> dict[str, dict]:
    """Of each module its ``__all__``, and which of the names that the migration guide has it lacks."""
    asked = {MODULES[title]: list(names) for title, names in HOROVODS.items()}
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_USE_LEGACY_KERAS", None)
    done = subprocess.run(
        [sys.executable, "-c", LOOK], input=json.dumps(asked), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("LOOK ")[1])


def documented(page: str) -> list[str]:
    """The names on a page of the API: a heading if one is given, else the last part of what is documented."""
    entries = re.findall(r"^::: (\S+)\n((?:    .*\n)*)", (DOCS / "api" / f"{page}.md").read_text() + "\n", re.M)
    headings = [(re.search(r"^ +heading: (\S+)", options, re.M), path) for path, options in entries]
    return [heading[1] if heading else path.rpartition(".")[2] for heading, path in headings]


def test_the_settings_table_is_the_one_that_config_generates():
    table = (DOCS / "settings.md").read_text().split("<!-- settings -->")[1].split("<!-- /settings -->")[0].strip()
    assert table == tables.settings(), "run: python -m docs.hooks.tables"


@pytest.mark.parametrize("page", sorted(page.name for page in (DOCS / "howto").glob("*.md") if page.stem != "index"))
def test_a_how_to_page_links_and_shows_each_script_as_it_is(page):
    text = (DOCS / "howto" / page).read_text()
    scripts = re.findall(r"^<!-- code: (.+) -->$", text, re.M)
    assert scripts
    for script in scripts:
        assert f"[`{script}`](../../{script}):\n\n{code.shown(script)}\n" in text, "run: python -m docs.hooks.code"


def test_the_flags_are_those_of_hvdkitrun():
    text = (DOCS / "api" / "hvdkitrun.md").read_text().split("<!-- flags -->")[1].split("<!-- /flags -->")[0].strip()
    assert text == tables.flags(), "run: python -m docs.hooks.tables"


def literals() -> list[str]:
    """All text in hvdkit's sources that may be said, with an ellipsis where a value is filled in."""
    found = []
    for path in (DOCS.parent / "hvdkit").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if is_text(part) else "…" for part in node.values))
            elif is_text(node) and id(node) not in docstrings:
                found.append(node.value)
    return found


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_messages_that_the_page_of_errors_explains_are_said():
    said = literals()
    table = (DOCS / "errors.md").read_text().split("\n## What a message means\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?`) \| ", table, re.M)
    messages = [message for cell in first_cells for message in re.findall("`(.*?)`", cell)]
    assert len(messages) >= 20
    for message in messages:
        pattern = ".+".join(re.escape(part) for part in message.strip("… ").split("…"))
        assert any(re.search(pattern, text, re.S) for text in said), f"hvdkit does not say {message!r}"


def test_the_citation_names_this_version():
    assert f"\nversion: {hvdkit.__version__}\n" in (DOCS.parent / "CITATION.cff").read_text()


@pytest.mark.parametrize("module", PAGES)
def test_a_page_of_the_api_has_all_names_of_its_module_and_no_others(modules, module):
    names = [name for name in documented(PAGES[module]) if not name.startswith("hvd.elastic.")]
    assert len(names) == len(set(names))
    expected = set(modules[module]["all"])
    if module == "hvdkit.keras":
        expected = expected - {"callbacks"} | set(modules[CALLBACKS]["all"])
    assert set(names) == expected


@pytest.mark.parametrize("page", PAGES.values())
def test_a_page_of_the_api_names_all_codecs(page):
    (sentence,) = re.findall(r"^(.*) are its attributes\.", (DOCS / "api" / f"{page}.md").read_text(), re.MULTILINE)
    # `none` is not a codec, and each adapter has casts of its own.
    names = {name for name in vars(Codecs) if not name.startswith("_")} | {"none", "fp16", "bf16"}
    assert set(re.findall(r"`(\w+)`", sentence)) == names


def test_the_callbacks_have_the_same_names_for_keras_and_for_tf_keras(modules):
    assert modules["hvdkit.tensorflow.keras.callbacks"]["all"] == modules[CALLBACKS]["all"] != []


def test_the_migration_guide_has_every_module_that_has_horovods_name():
    assert HOROVODS.keys() == MODULES.keys()
    assert len(HOROVODS["horovod.torch"]) > 60


@pytest.mark.parametrize("title", HOROVODS)
def test_what_the_migration_guide_calls_absent_is_missing_and_all_else_is_there(modules, title):
    missing = modules[MODULES[title]]["missing"]
    assert set(missing) == {name for name, status in HOROVODS[title].items() if status == ABSENT}


@pytest.mark.parametrize("title", ["horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras"])
def test_who_asks_an_adapter_for_what_is_absent_is_told_what_there_is_instead(modules, title):
    for name, message in modules[MODULES[title]]["missing"].items():
        assert message == str(missing_attribute(MODULES[title], name))


# Flags that Horovod does not have.
OWN_FLAGS = {
    "-h", "--help", "--as-horovod", "--stop-grace", "--blacklist", "--function-folder",
    "--listen", "--join", "--secret-file", "--slots", "--hostname", "--rescue",
}  # fmt: skip


def test_flags_are_accepted_or_refused_as_the_migration_guide_says():
    said, reasons = rows("Flags of horovodrun"), tables.effects()
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert said.keys() <= flags
    assert flags - said.keys() == OWN_FLAGS
    expected = {"no effect": OTHERWISE, "refused": ABSENT, "hvdkit always behaves in this way": PRESENT}
    for flag, status in said.items():
        assert status == (expected[reasons[flag].partition(":")[0]] if flag in reasons else PRESENT), flag


def test_variables_set_what_the_migration_guide_says():
    said = rows("Environment variables")
    names = {name for setting in config.Settings.__dataclass_fields__ for name in config.names_of(setting)}
    assert {name for name, status in said.items() if status == PRESENT} == {
        name for name in names if name.startswith("HOROVOD_")
    }


def test_the_readme_is_read_on_one_screen():
    assert len([line for line in README.splitlines() if not line.startswith("<!--")]) <= 80


def test_what_the_readme_links_to_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", README)
    assert len(links) > 10
    assert [link for link in links if not (DOCS.parent / link).exists()] == []
