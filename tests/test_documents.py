"""README and docs as a reader meets them: every block of code runs, every link leads somewhere, the site builds.

A document's blocks run from top to bottom in one empty folder, Python in one namespace, `evenhand` commands as a shell
would. A comment right before a block, which readers do not see, says what it needs here:

    <!-- test: with --rounds 2 -->           further options for its run, compare and tune commands: a smaller scale
    <!-- test: needs my.csv -->              files that the reader has (FILES below)
    <!-- test: file mymodel.py -->           the block is this file, not a program
    <!-- test: after evenhand run ... -->    a command to run before it
    <!-- test: exit 1 -->                    the exit code of its commands
    <!-- test: parse WHY -->                 too long, or needs more than is here: commands are parsed and not run,
                                             pieces of a program compiled, other programs' settings read
    <!-- test: printed except WORDS -->      the block before prints these lines; those with such words may differ
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType

import click
import markdown_it
import numpy as np
import pytest
import torch
import typer
from scipy.stats import ttest_1samp

import evenhand as eh
from evenhand import cli
from evenhand.experiment import load_toml
from evenhand.methods import METHODS
from evenhand.recipe import find_recipe

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
MARK = re.compile(r"<!--\s*test:\s*(\w+)\s*(.*?)\s*-->")
MARKS = ("with", "needs", "file", "after", "exit", "parse", "printed")
TRAINING = ("run", "compare", "tune")
NO_PROGRAM = ("text", "latex")  # what a program prints, or a formula
FLOWERS = ("flwr", "flower-superlink", "flower-supernode")
OTHERS = ("openssl", "ssh-keygen", "ssh", "printf", "chmod", "export")


class UnknownCommand(Exception):
    pass


@dataclass
class Block:
    language: str
    text: str
    line: int
    marks: dict[str, str] = field(default_factory=dict)


def tokens(document: str) -> list:
    return markdown_it.MarkdownIt("commonmark").enable("table").parse((ROOT / document).read_text())


def blocks(document: str) -> list[Block]:
    found, marks = [], {}
    for token in tokens(document):
        if token.type == "html_block":
            marks |= dict(MARK.findall(token.content))
        elif token.type in ("fence", "code_block"):
            language = token.info.split()[0] if token.info.strip() else ""
            found.append(Block(language, token.content, token.map[0] + 1, marks))
            marks = {}
        elif marks:
            raise AssertionError(f"{document}: {marks} does not stand right before a block")
    return found


WITH_BLOCKS = [document for document in DOCUMENTS if blocks(document)]


# ------------------------------------------------------------------------------------------ what a reader has


def my_csv() -> str:
    rng = np.random.default_rng(0)
    rows = [f"{'abcd'[i % 4]},{'FM'[i % 3 // 2]},{18 + i % 60},{rng.normal():.3f},{i % 2}" for i in range(160)]
    return "\n".join(["site,sex,age,weight,y", *rows, ""])


def predictions_csv() -> str:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(600):
        hospital, sex, label = "abc"[i % 3], "FM"[i // 3 % 2], int(rng.integers(2))
        guess = label if rng.random() < (0.6 if hospital == "a" else 0.9) else 1 - label
        rows.append(f"{hospital},{sex},{('young', 'old')[i % 7 // 4]},{label},{guess}")
    return "\n".join(["hospital,sex,age_band,y,yhat", *rows, ""])


FILES = {"my.csv": my_csv, "predictions.csv": predictions_csv}


# ---------------------------------------------------------------------------------------------- running a block


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder from which modules are imported; methods registered in a document are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known, modules = dict(METHODS), set(sys.modules)
    yield tmp_path
    METHODS.clear()
    METHODS.update(known)
    sys.modules.pop("document", None)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def parsed(arguments: list[str]) -> None:
    """Insist that the command line is one: its command, options, methods and recipes are known."""
    name, *rest = arguments
    command = typer.main.get_command(cli.app).commands.get(name)
    if command is None:
        raise UnknownCommand(f"evenhand has no command {name!r}")
    values = command.make_context(name, rest).params
    for method in [values["method"]] if values.get("method") else values.get("methods") or []:
        eh.method(method)
    if name == "reproduce":
        find_recipe(values["name"])


def run_command(line: str, block: Block) -> None:
    words = shlex.split(line, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):  # variables for the command
        del words[0]
    program, *arguments = words
    if "parse" in block.marks and program in (*FLOWERS, *OTHERS):
        here = shutil.which(program, path=str(Path(sys.executable).parent))
        assert program in OTHERS or here or importlib.util.find_spec("flwr") is None, f"there is no {program!r}"
    elif program == "evenhand":
        if arguments[0] in TRAINING and "--resume" not in arguments:
            arguments += shlex.split(block.marks.get("with", ""))
        if "parse" in block.marks:
            parsed(arguments)
            return
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert int(left.value.code or 0) == int(block.marks.get("exit", 0)), line
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments) <= set(targets), line
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for wanted in re.findall(r"\[(.*?)\]", line):
            assert set(wanted.split(",")) <= set(extras), line
    elif program == "python":
        assert (ROOT / arguments[0]).is_file(), line
    else:
        raise AssertionError(f"{line!r}: the tests do not know what to do with {program!r}")


def run_block(block: Block, folder: Path, names: dict[str, object], printed: str) -> None:
    for mark, said in block.marks.items():
        assert mark in MARKS, f"unknown mark {mark!r}"
        assert said, f"{mark} says nothing"
    for name in block.marks.get("needs", "").split():
        (folder / name).write_text(FILES[name]())
    if "after" in block.marks:
        run_command(block.marks["after"], Block("sh", "", block.line))
    if "file" in block.marks:
        (folder / block.marks["file"]).write_text(block.text)
    elif block.language == "python":
        program = ast.parse("\n" * block.line + block.text)
        if "parse" in block.marks:
            program.body = [one for one in program.body if isinstance(one, ast.Import | ast.ImportFrom)]
        exec(compile(program, "document", "exec"), names)
    elif block.language == "sh":
        for line in block.text.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                run_command(line, block)
    elif block.language == "toml":
        (folder / "described.toml").write_text(block.text)
        if "parse" in block.marks:
            tomllib.loads(block.text)
            if "deployment" in block.marks["parse"]:
                from evenhand.flower.deployment import Deployment

                Deployment.read(folder / "described.toml")
        else:
            load_toml(folder / "described.toml")
    elif "printed" in block.marks:
        unsteady = block.marks["printed"].removeprefix("except ").split("; ")
        lines = [line for line in block.text.splitlines() if not any(word in line for word in unsteady)]
        assert len(lines) > 2, "nothing is left to compare"
        for line in lines:
            assert line in printed, f"the block before does not print {line!r}"
    else:
        assert block.language in NO_PROGRAM, "a block needs a fence and a language: python, sh, toml or text"


@pytest.mark.parametrize("document", WITH_BLOCKS)
def test_the_blocks_of_a_document_run(document, reader, capsys):
    if document == "docs/flower.md":
        pytest.importorskip("flwr")
    names = vars(sys.modules.setdefault("document", ModuleType("document")))  # dataclasses look for their module
    printed = ""
    for block in blocks(document):
        try:
            run_block(block, reader, names, printed)
        except Exception as error:
            said = capsys.readouterr()
            where = f"{document}, line {block.line}: {type(error).__name__}"
            raise AssertionError(f"{where}: {error}\n{said.out[-800:]}{said.err[-800:]}") from error
        printed = capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_the_text_are_commands(document):
    for token in tokens(document):
        for part in token.children or []:
            if part.type == "code_inline" and part.content.startswith("evenhand "):
                words = [word for word in shlex.split(part.content)[1:] if word != "..."]
                try:
                    parsed(words)
                except (click.NoSuchOption, UnknownCommand) as error:
                    raise AssertionError(f"{document}: {part.content}: {error}") from error
                except (click.UsageError, click.exceptions.Exit, eh.EvenhandError):
                    pass  # `evenhand run METHOD` stands for a command and is none


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_scripts_in_the_text_are_there(document):
    for script in re.findall(
        r"(?:docs|benchmarks|examples|tests)/[\w/.-]+\.(?:py|ipynb)", (ROOT / document).read_text()
    ):
        assert (ROOT / script).is_file(), f"{document} names {script}, which is not there"


def test_a_wrong_command_line_is_noticed():
    parsed(["compare", "fedavg", "fedfv:alpha=0.2", "--rounds", "5"])
    with pytest.raises(click.NoSuchOption):
        parsed(["compare", "fedavg", "--round", "5"])
    with pytest.raises(UnknownCommand):
        parsed(["compete", "fedavg"])
    with pytest.raises(eh.EvenhandError):
        parsed(["run", "fedvf"])
    with pytest.raises(eh.EvenhandError):
        parsed(["reproduce", "fedfv/table9"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    for token in tokens(document):
        for part in token.children or []:
            target = str(part.attrs.get("href", part.attrs.get("src", "")))
            path, _, _ = target.partition("#")
            if path and not re.match(r"[a-z]+:", path):
                assert ((ROOT / document).parent / path).exists(), f"{document} links to {target}"


def test_every_method_is_in_the_documents_with_advice():
    text = (ROOT / "docs" / "methods.md").read_text()
    for entry in eh.methods():
        assert f"`{entry.name}`" in text, entry.name
        assert len(entry.when) > 20, entry.name
        assert len(entry.when_not) > 20, entry.name


# ------------------------------------------------------------------------------------------------------ notebooks

NOTEBOOKS = sorted(path.name for path in (ROOT / "examples").glob("*.ipynb"))
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
"""


def test_the_notebooks_are_there():
    assert {"own_csv.ipynb", "new_method.ipynb"} <= set(NOTEBOOKS)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, "-c", EXECUTE, str(ROOT / "examples" / notebook)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------------------------------------------- the site


def site_builder():
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "docs" / "site" / "make_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", list(METHODS))
def test_a_methods_page_says_what_there_is_to_know(name):
    builder = site_builder()
    page = builder.method_page(name)
    made = eh.method(name)
    for title in ("The idea", "When to use it", "When not", "Paper and formulas", "Options", "Use it"):
        assert f"\n## {title}\n" in page
    for part in (made.rule, made.server, made.objective):
        for setting in fields(part):
            assert re.search(rf"^\| `{setting.name}` \| `.+` \| .+ \| \S.+ \|$", page, flags=re.MULTILINE), setting.name
    assert eh.method(builder.written(name)) == made
    parsed(shlex.split(builder.command(name))[1:])


def test_docstrings_become_pages():
    builder = site_builder()
    text = "Weights a*b of `x_k`.\n\nWith F_ and |g|,\n    w = K^-1 b,\nthen done."
    assert builder.as_markdown(text) == (
        "Weights a\\*b of `x_k`.\n\nWith F_ and |g|,\n\n```text\nw = K^-1 b,\n```\n\nthen done."
    )
    assert builder.as_rst(text) == (
        "Weights a\\*b of ``x_k``.\n\nWith F\\_ and \\|g\\|,\n\n::\n\n    w = K^-1 b,\n\nthen done.\n"
    )


def test_the_api_reference_is_whole():
    listed = {name for _, names in site_builder().API.values() for name in names.split()}
    assert set(eh.__all__) <= listed


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason='the site needs pip install "evenhand[docs]"')
    command = [sys.executable, str(ROOT / "docs" / "site" / "make_site.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.relative_to(tmp_path / "site").as_posix(): path for path in (tmp_path / "site").rglob("*.html")}
    builder = site_builder()
    assert {"index.html", "start.html", "choose.html", "search.html"} <= set(pages)
    assert {f"methods/{builder.file_of(entry.name)}.html" for entry in eh.methods()} <= set(pages)
    assert {f"examples/{Path(name).stem}.html" for name in NOTEBOOKS} <= set(pages)
    assert 'id="evenhand.aggregate"' in pages["api/round.html"].read_text()
    fetched = re.compile(
        r"""(?:<(?:script|img|iframe|source)[^>]+src=|<link[^>]+href=|url\(|@import )["']?(https?:)?//"""
    )
    for path in [*pages.values(), *(tmp_path / "site").rglob("*.css")]:
        found = fetched.search(path.read_text())
        assert found is None, f"{path.name}: {found[0]}"


def results_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "results" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_table_of_the_readme_is_that_of_the_committed_runs():
    front = results_script("front")
    assert front.table(front.read()) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_pairs_are_of_the_same_part_and_seed(capsys):
    pairs = results_script("pairs")
    with (pairs.HERE / "fedlf-table2" / "results.csv").open(newline="", encoding="utf-8") as lines:
        runs = [run for run in csv.DictReader(lines) if run["stage"] == "final" and run["rounds"] == "3000"]
    known = {(run["row"], run["part"], run["seed"]): run for run in runs}
    pairs.main("fedlf/table2", "even", ["FedLF"], quirks=False)
    printed = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[1] for line in printed] == [
        "CIFAR-10 Dir(0.1)",
        "CIFAR-10 Pat-1",
        "CIFAR-10 Pat-2",
        "all 3",
    ]
    for line in printed:
        _, part, *said, _ = line.strip("| ").split(" | ")
        mine = [run for (row, here, _), run in known.items() if row == "even" and (here == part or part == "all 3")]
        for place, measure in enumerate(("mean", "angle_radians", "worst")):
            more = [float(run[measure]) - float(known["FedLF", run["part"], run["seed"]][measure]) for run in mine]
            assert len(more) == (15 if part == "all 3" else 5)
            assert float(said[2 * place]) == pytest.approx(np.mean(more), abs=1e-4)
            assert float(said[2 * place + 1]) == pytest.approx(ttest_1samp(more, 0.0).pvalue, abs=1e-4)


def test_the_times_of_the_recipes_are_those_of_the_committed_runs():
    pages = results_script("pages")
    said = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[.+?\]\(results/(.+?)/results\.md\).*\| (.+?) \|$", said, flags=re.MULTILINE)
    assert len(listed) > 30
    assert dict(listed) == {name: pages.times(pages.HERE / name) for name, _ in listed}
    assert f"shortened ones too: {pages.times(*pages.folders())})" in said
    for place in pages.folders():
        assert f"results/{place.name}/results.md" in said


def test_the_arithmetic_of_runs_is_counted(tmp_path):
    floor = results_script("floor")
    products = [784 * 200, 200 * 200, 200 * 10]
    back = 2 * sum(products) - products[0]  # of all weights, and of the errors below all layers but the first
    once = floor.operations("mlp", (), torch.Size((1, 28, 28)), 10)
    assert once == 2 * (sum(products) + back)
    told = eh.Experiment().with_settings(
        {"data": "fashion-mnist", "model": "mlp", "clients": 100, "rounds": 30, "work.epochs": 2}
    )
    told = told.with_settings({"sampling.participation": 0.1, "split": [0.5, 0.0, 0.5]})
    assert floor.of_a_run(told, str(tmp_path)) == (pytest.approx(30 * 2 * 70_000 * 0.5 * 0.1 * once), False)
    table = floor.find_recipe("fedfv/table3")
    runs = sum(seeds for _, seeds in floor.runs_of(table))
    assert table.takes.startswith(f"{runs} runs of ")
