"""Build the site: `make docs`, or `python docs/site/make_site.py --out FOLDER`. Warnings are errors.

The pages are laid out in a folder of their own, so that nothing is written beside the sources: those of docs/ as they
are, a page for every method from its docstrings and fields, the API reference, the notebooks, and the documents of the
repository's root. A link that leaves docs/ leads to the page that was made of its target, to the file as a
download, or, where it is a folder, nowhere.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"

RESULTS = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix()
    for pattern in ("results/*.md", "results/*/results.md")
    for path in DOCS.glob(pattern)
    if not path.stem.endswith("_findings")
)

# What the side bar shows, in this order; a page of docs/ that is not here comes under "More".
NAVIGATION = {
    "Begin": ["start", "choose"],
    "How to": ["compare", "data", "model", "add-a-method", "audit", "resume", "tune", "notebooks"],
    "See and deploy": ["report", "watch", "loggers", "flower"],
    "Reference": ["methods", "even", "simulator", "api", "benchmarks"],
    "Results": ["findings", "recipes", *RESULTS],
    "Project": ["contributing", "changelog"],
}
MADE_OF = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog", "README.md": "index"}

# The API reference: a page, its title, and the objects on it. tests/test_documents.py sees to it that all of
# `evenhand.__all__` is here.
API = {
    "round": ("One round, in your own loop", "aggregate Aggregate Diagnostics State"),
    "methods": (
        "Methods and their parts",
        "method methods register Method MethodInfo Rule Round Weights ServerStep Objective",
    ),
    "simulator": ("The simulator", "simulate Experiment resume load_runs runs.Runs runs.Run Callback"),
    "comparison": (
        "Comparing and tuning",
        "compare load_comparison resume_comparison comparison.Comparison tune",
    ),
    "fairness": ("Measures and audits", "client_fairness group_fairness audit"),
    "data": (
        "Data, partitions and networks",
        "data.load data.partition data.datasets data.partitions data.Dataset data.Partition data.Split data.Noise "
        "models.build models.models",
    ),
    "recipes": ("Papers' tables", "recipes reproduce"),
    "errors": ("Errors", "EvenhandError"),
}

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
COMMENT = re.compile(r"^    (\w+):[^=#\n]+=[^#\n]*?  # (.+)$", flags=re.MULTILINE)
PARAMETER = re.compile(r"^([a-z_]+(?:, [a-z_]+)*):(?= )", flags=re.MULTILINE)
SETTLED = ("Departure", "Departures")


# --------------------------------------------------------------------------------------------- docstrings as pages


def paragraphs(docstring: str) -> Iterator[tuple[bool, str]]:
    """A cleaned docstring in pieces: prose, or (True) indented lines, which are formulas, and examples."""
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        kept: list[str] = []
        set_apart = False
        for line in block.splitlines():
            indented = line.startswith("    ") or line.startswith(">>>") or (set_apart and block.startswith(">>>"))
            if indented != set_apart and kept:
                yield set_apart, "\n".join(kept)
                kept = []
            set_apart = indented
            kept.append(line)
        if kept:
            yield set_apart, "\n".join(kept)


def as_markdown(docstring: str) -> str:
    """Prose as it is, with stars escaped; indented lines as blocks of text."""
    pieces = []
    for set_apart, text in paragraphs(docstring):
        if set_apart:
            pieces.append(f"```text\n{textwrap.dedent(text)}\n```")
        else:
            spans = text.split("`")
            spans[::2] = [span.replace("*", r"\*") for span in spans[::2]]
            pieces.append("`".join(spans))
    return "\n\n".join(pieces)


def listed(docstring: str) -> str:
    """Lines such as `losses: what it is`, with what goes on below them indented, as a list."""
    blocks = re.split(r"\n\s*\n", docstring.strip("\n"))
    for place, block in enumerate(blocks):
        if len(PARAMETER.findall(block)) > 1 and PARAMETER.match(block):
            items = re.sub(r"\n\s+", " ", block).splitlines()
            blocks[place] = "\n".join(PARAMETER.sub(r"- `\1`:", item) for item in items)
    return "\n\n".join(blocks)


def as_rst(docstring: str) -> str:
    """The same for Sphinx's autodoc, which reads reStructuredText."""
    pieces = []
    for set_apart, text in paragraphs(listed(docstring)):
        if set_apart and text.startswith(">>>"):
            pieces.append(text)
        elif set_apart:
            pieces.append("::\n\n" + textwrap.indent(textwrap.dedent(text), "    "))
        else:
            spans = text.split("`")
            spans[::2] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"([*|])", r"\\\1", span)) for span in spans[::2]]
            spans[1::2] = [f"``{span}``" for span in spans[1::2]]
            pieces.append("".join(spans))
    return "\n\n".join(pieces) + "\n"


# --------------------------------------------------------------------------------------------------- a page a method


def method_page(name: str) -> str:
    """What a method's file, its parts and its fields say, in the order in which a reader asks."""
    import evenhand as eh

    made = eh.method(name)
    (info,) = (entry for entry in eh.methods() if entry.name == name)
    idea, formulas, departures = _said_of(made)
    page = [f"# {name}", info.summary, _facts(info, made), "## The idea", idea]
    page += ["## When to use it", as_markdown(info.when), "## When not", as_markdown(info.when_not)]
    page += ["## Paper and formulas", formulas or f"{info.paper}."]
    if departures:
        page += ["## Where it departs from the paper", departures]
    page += ["## Options", _options(made)]
    page += ["## Use it", f"```sh\n{command(name)}\n```", f"```python\n{in_python(name)}\n```"]
    return "\n\n".join(page) + "\n"


def written(name: str) -> str:
    """The method with one of its own settings written out, as on a command line."""
    import evenhand as eh

    made, plain = eh.method(name), eh.method("fedavg")
    own = [part for part in (made.rule, made.objective, made.server) if part not in (plain.rule, plain.server)]
    for part in [*own, made.rule]:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                return f"{name}:{field.name}={value}"
    return name


def in_python(name: str) -> str:
    import evenhand as eh

    data = ', data="synthetic-groups", participation=1.0' if eh.method(name).objective.grouped else ""
    return f'import evenhand as eh\n\nrun = eh.simulate(method="{written(name)}"{data})'


def command(name: str) -> str:
    import evenhand as eh

    grouped = eh.method(name).objective.grouped
    return f"evenhand run {written(name)}" + (" --data synthetic-groups --participation 1" if grouped else "")


def _said_of(made: Any) -> tuple[str, str, str]:
    """The idea, paper and formulas, and departures, from the docstrings of whatever sets the method apart."""
    from evenhand.methods import FedAvg, Plain, PlainRisk

    own = not isinstance(made.rule, FedAvg) or (made.objective == PlainRisk() and made.server == Plain())
    told = [inspect.getmodule(type(made.rule)).__doc__] if own else []  # type: ignore[union-attr]
    if made.objective != PlainRisk():
        told.append(type(made.objective).__doc__)
    if made.server != Plain() and inspect.getmodule(type(made.server)) is not inspect.getmodule(type(made.rule)):
        first = type(made.server).__doc__ or ""
        told.append(f"{first}\n\n{inspect.getmodule(type(made.server)).__doc__}" if not own else first)  # type: ignore[union-attr]
    idea, formulas, departures = [], [], []
    for docstring in told:
        first, *rest = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))
        idea.append(first)
        for paragraph in rest:
            (departures if paragraph.startswith(SETTLED) else formulas).append(paragraph)
    return tuple("\n\n".join(map(as_markdown, pieces)) for pieces in (idea, formulas, departures))  # type: ignore[return-value]


def _facts(info: Any, made: Any) -> str:
    needs = ", ".join(f"`{need}`" for need in info.needs) or "nothing but the updates"
    if info.groups:
        needs += "; sums over groups and labels"
    memory = {"off": "not used", "expected": "kept until a client is expected back"}.get(made.rule.memory)
    memory = memory or f"kept for {made.rule.memory.removeprefix('last:')} round(s)"
    rows = [
        ("paper", info.paper),
        ("the server needs", needs),
        ("parts", f"rule `{made.rule.name}`, server step `{made.server.name}`, objective `{made.objective.name}`"),
        ("updates of absent clients", memory),
    ]
    return "| in short | |\n|---|---|\n" + "\n".join(f"| {head} | {cell} |" for head, cell in rows)


def _options(made: Any) -> str:
    rows = []
    for spoken, part in (("rule", made.rule), ("server step", made.server), ("objective", made.objective)):
        said = comments(type(part))
        for field in fields(part):
            value = getattr(part, field.name)
            shown = f'"{value}"' if isinstance(value, str) else f"{value}"
            meaning = said.get(field.name, "").replace("|", "&#124;")
            rows.append(f"| `{field.name}` | `{shown}` | {spoken} | {meaning} |")
    if not rows:
        return "None."
    return "| setting | default | of the | meaning |\n|---|---|---|---|\n" + "\n".join(rows)


def comments(part: type) -> dict[str, str]:
    """What is written behind each field of a dataclass."""
    found: dict[str, str] = {}
    for kind in reversed(part.__mro__[:-1]):
        found |= dict(COMMENT.findall(inspect.getsource(kind)))
    return found


def method_list() -> str:
    """Every method with a link to its page."""
    import evenhand as eh

    rows = [f"| [{entry.name}](methods/{file_of(entry.name)}.md) | {entry.summary} |" for entry in eh.methods()]
    return "| method | what it does |\n|---|---|\n" + "\n".join(rows)


def file_of(name: str) -> str:
    return name.replace("+", "-plus")


# ---------------------------------------------------------------------------------------------- the other made pages


def api_page(title: str, names: str) -> str:
    """Autodoc directives for some objects."""
    import evenhand

    page = [f"# {title}"]
    for name in names.split():
        found: Any = evenhand
        for part in name.split("."):
            found = getattr(found, part, None) or __import__(f"evenhand.{part}", fromlist=["_"])
        kind = "exception" if inspect.isclass(found) and issubclass(found, Exception) else ""
        kind = kind or ("class" if inspect.isclass(found) else "function")
        page.append(f"```{{eval-rst}}\n.. auto{kind}:: evenhand.{name}\n```")
    return "\n\n".join(page) + "\n"


def notebook_page(path: Path, pictures: Path) -> str:
    """A notebook as Markdown: its text, its code, and what its code printed or drew."""
    import base64

    page = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            page.append(source)
            continue
        page.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                picture = pictures / f"{path.stem}-{number}-{place}.png"
                picture.write_bytes(base64.b64decode("".join(data["image/png"])))
                page.append(f"![what the cell drew]({picture.name})")
            else:
                text = "".join(data.get("text/plain", output.get("text", ""))).rstrip("\n")
                page.append(f"```text\n{text}\n```")
    page.append(f"The notebook itself: [{path.name}](../files/examples/{path.name}).")
    return "\n\n".join(page) + "\n"


def toctree(pages: list[str], caption: str = "") -> str:
    said = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n:hidden:\n:maxdepth: 2\n{said}\n" + "\n".join(pages) + "\n```\n"


# ----------------------------------------------------------------------------------------------------------- the site


def lay_out(stage: Path) -> None:
    """Write every page of the site, as Markdown, into an empty folder."""
    import evenhand as eh

    pages = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    texts = {name: localised(path.read_text(), path, stage) for name, path in pages.items()}
    for name, page in MADE_OF.items():
        if page != "index":
            texts[page] = localised((ROOT / name).read_text(), ROOT / name, stage, inside=page)
    shutil.copytree(DOCS / "images", stage / "images")
    for table in DOCS.glob("results/**/*.csv"):
        _copied(table, stage)

    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    (stage / "examples").mkdir()
    for path in notebooks:
        _copied(path, stage)
        texts[f"examples/{path.stem}"] = notebook_page(path, stage / "examples")
    texts["notebooks"] += "\n" + toctree([f"examples/{path.stem}" for path in notebooks])

    names = [entry.name for entry in eh.methods()]
    texts |= {f"methods/{file_of(name)}": method_page(name) for name in names}
    texts["methods"] = texts["methods"].replace("<!-- site: the list of methods -->", method_list())
    texts["methods"] += "\n" + toctree([f"methods/{file_of(name)}" for name in names])

    texts |= {f"api/{page}": api_page(title, objects) for page, (title, objects) in API.items()}
    entries = "\n".join(f"- [{title}](api/{page}.md)" for page, (title, _) in API.items())
    texts["api"] = f"# API reference\n\n`import evenhand as eh` gives all of these but the dotted names.\n\n{entries}\n"
    texts["api"] += "\n" + toctree([f"api/{page}" for page in API])

    known = {page for section in NAVIGATION.values() for page in section} | {"index"}
    more = sorted(set(pages) - known)
    for caption, section in (NAVIGATION | ({"More": more} if more else {})).items():
        texts["index"] += "\n" + toctree(section, caption)
    for name, text in texts.items():
        path = stage / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def localised(text: str, path: Path, stage: Path, inside: str = "") -> str:
    """A page's text with its links turned to where things are on the site. A link to nothing is an error."""
    here = Path(inside or path.relative_to(DOCS)).parent

    def turn(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        real = (path.parent / target).resolve()
        if not real.exists():
            raise SystemExit(f"{path.relative_to(ROOT)} links to {target!r}, which is not there")
        if real.is_relative_to(DOCS) and real.suffix not in (".csv", ".svg"):
            return os.path.relpath(real.relative_to(DOCS), here) + anchor
        name = real.relative_to(ROOT).as_posix()
        if name in MADE_OF:
            return os.path.relpath(f"{MADE_OF[name]}.md", here) + anchor
        if real.suffix == ".ipynb":
            return os.path.relpath(f"examples/{real.stem}.md", here)
        if real.is_dir():
            return "#nowhere"
        _copied(real, stage)
        return os.path.relpath(f"files/{name}", here)

    text = LINK.sub(turn, text)
    return re.sub(r"\[([^\]]*)\]\(#nowhere\)", r"\1", text)


def _copied(path: Path, stage: Path) -> None:
    place = stage / "files" / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def build(out: Path, stage: Path) -> int:
    """The HTML pages; the exit code of Sphinx, for which a warning is an error."""
    lay_out(stage)
    options = ["-b", "html", "-c", str(HERE), "-W", "--keep-going", "-q", "-d", str(stage.parent / "doctrees")]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, str(stage), str(out)], check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder for the pages")
    out = parser.parse_args().out.resolve()
    if (out / ".buildinfo").is_file():  # an older site, of which nothing may stay behind
        shutil.rmtree(out)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder) / "pages"
        stage.mkdir()
        code = build(out, stage)
    if code == 0:
        print(f"site    {out / 'index.html'}  (open it in a browser)")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
