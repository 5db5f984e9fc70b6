"""The command line as a person meets it: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

from typer.main import get_command

from evenhand import __version__, cli
from evenhand.experiment import load_toml
from evenhand.methods import OBJECTIVES, SERVERS

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--clients", "12", "--rounds", "4", "--eval-every", "2"]


def test_the_version(evenhand):
    assert evenhand("--version") == (0, f"evenhand {__version__}\n", "")


@pytest.mark.parametrize("command", sorted(get_command(cli.app).commands))
def test_every_command_explains_itself(evenhand, command):
    code, said, _ = evenhand(command, "--help")
    assert code == 0
    assert "Usage: evenhand" in said
    assert len(said.splitlines()[2].strip()) > 20
    assert "\\" not in said
    listed = evenhand("--help")[1]
    assert command in listed


def test_no_option_is_described_by_its_own_name():
    """typer 0.27 would take the description for the option, so that --seeds became --SEEDS."""
    commands = get_command(cli.app).commands.values()
    options = [option for command in commands for option in command.params if option.param_type_name == "option"]
    assert len(options) > 100
    assert not [option.opts for option in options if (option.metavar or "").lower() == option.name]


@pytest.mark.parametrize("command", ["run", "compare", "partitions", "report", "methods", "datasets"])
def test_help_shows_examples_line_by_line(evenhand, command):
    lines = [line.strip() for line in evenhand(command, "--help")[1].splitlines()]
    assert any(line.startswith(f"evenhand {command}") for line in lines)


def test_a_run_prints_what_it_found_and_where_it_is(evenhand):
    code, said, complained = evenhand("run", "fedfv:alpha=0.3", *SMALL, "--seeds", "2")
    assert (code, complained) == (0, "")
    assert "12 clients: on average" in said
    assert "runs/digits-fedfv-1" in said
    chosen = load_toml("runs/digits-fedfv-1/experiment.toml")
    assert (chosen.method.rule.alpha, chosen.seeds, chosen.clients) == (0.3, (0, 1), 12)


def test_json_is_all_there_is_on_stdout(evenhand):
    code, said, complained = evenhand("run", *SMALL, "--json")
    found = json.loads(said)
    assert (code, complained) == (0, "")
    assert found["folder"] == "runs/digits-even-1"
    assert 0 <= found["mean"]["worst"] <= found["mean"]["mean"] <= 1
    assert evenhand("run", *SMALL, "--json")[1].replace("even-2", "even-1") == said


def test_quiet_is_quiet(evenhand):
    assert evenhand("run", *SMALL, "--quiet", "--out", "here") == (0, "", "")
    assert Path("here/summary.json").is_file()


def test_settings_come_from_the_file_then_the_options_then_set(evenhand):
    Path("mine.toml").write_text('method = "fedfv:alpha=0.1"\nrounds = 9\nclients = 12\n[work]\nlr = 0.7\n')
    options = ["--rounds", "3", "--batch-size", "0", "--set", "method.alpha=0.4", "--set", "work.clip=2.5"]
    assert evenhand("run", "--config", "mine.toml", *options, "--out", "here", "-q")[0] == 0
    chosen = load_toml("here/experiment.toml")
    assert (chosen.rounds, chosen.clients, chosen.work.lr) == (3, 12, 0.7)
    assert (chosen.work.batch_size, chosen.work.clip, chosen.method.rule.alpha) == (None, 2.5, 0.4)


def test_every_run_writes_the_file_that_repeats_it(evenhand):
    evenhand("run", "adafed", *SMALL, "--seeds", "3,5", "--out", "one", "-q")
    evenhand("run", "--config", "one/experiment.toml", "--out", "two", "-q")
    for name in ("summary.json", "seed-3/rounds.jsonl", "seed-5/clients.csv", "seed-5/model.safetensors"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_your_own_table(evenhand):
    rng = np.random.default_rng(0)
    lines = [f"{'abc'[i % 3]},{rng.normal():.3f},{rng.normal():.3f},{'yes' if i % 2 else 'no'}" for i in range(120)]
    Path("my.csv").write_text("site,height,weight,ill\n" + "\n".join(lines) + "\n")
    options = ["--data", "my.csv", "--client-column", "site", "--target", "ill", "--model", "logistic"]
    code, said, complained = evenhand("run", *options, "--rounds", "3", "--participation", "1")
    assert (code, complained) == (0, "")
    assert "3 clients" in said
    assert "runs/my-even-1" in said
    code, said, _ = evenhand("partitions", "natural", *options[:-2])
    assert code == 0
    assert re.search(r"^a +\d+ ", said, flags=re.MULTILINE)


def test_groups_of_people(evenhand):
    lines = [f"{'abc'[i % 3]},{18 + i % 60},{'FM'[i % 2]},{i % 4 // 2}" for i in range(240)]
    Path("my.csv").write_text("site,age,sex,y\n" + "\n".join(lines) + "\n")
    options = ["--data", "my.csv", "--client-column", "site", "--sensitive", "sex,age:30,50"]
    code, said, complained = evenhand("partitions", "natural", *options)
    assert (code, complained) == (0, "")
    assert re.search(r"labels +sex +age_band\n", said)
    assert re.search(r"F: 40, M: 40  <30: \d+, 30-49: \d+, 50\+: \d+\n", said)
    found = json.loads(evenhand("partitions", "natural", *options, "--json")[1])
    assert found["sensitive"]["sex"] == {"groups": ["F", "M"], "counts": [[40, 40]] * 3}
    code, _, complained = evenhand("run", *options[:-1], "sex,age", "--rounds", "1")
    assert code == 2
    assert "'age' holds 60 different values" in complained
    code, _, complained = evenhand("run", *options, "--rounds", "1", "--model", "logistic", "--split", "0.8,0,0.2")
    assert code == 0
    assert complained.startswith("note: the inputs were standardised")
    assert load_toml("runs/my-even-1/experiment.toml").data_options["sensitive"] == "sex,age:30,50"
    assert "3 clients" in evenhand("partitions", "auto", "--data", "synthetic-groups")[1]
    three = evenhand("partitions", "auto", "--data", "synthetic-groups", "--set", "data_options.groups=3")[1]
    assert "4 clients" in three


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["run", "fairfed"], "fairfed looks at groups of people, and digits names no sensitive attribute"),
        (["run", "--data", "digist"], "unknown data set 'digist'; did you mean 'digits'?"),
        (["run", "--set", "method.alpha"], "not of the form NAME=VALUE"),
        (["run", "--set", "wrok.lr=1"], "did you mean 'work"),
        (["run", "--set", "colour=blue"], "has no setting 'colour'; did you mean 'cohort'? (it has method, data,"),
        (["run", "--seeds", "many"], "--seeds 'many'"),
        (["run", "--rounds", "0"], "rounds=0 must be a whole number, at least 1"),
        (["run", "--cohort", "3", "--participation", "0.5"], "give one of them"),
        (["run", "--cohort", "31"], "more than the 30"),
        (["run", "--resume", "nowhere"], "there is no folder 'nowhere'"),
        (["run", "--resume", "nowhere", "--rounds", "3"], "give no other settings"),
        (["run", "--config", "nowhere.toml"], "there is no file 'nowhere.toml'"),
        (["run", "--device", "tpu"], "device='tpu' is not one of"),
        (["run", "--split", "most"], "split='most'"),
        (["run", "--model", "mlpp"], "mlp"),
        (["run", "--partition", "pat:99"], "pat:99"),
        (["compare"], "name the methods to compare"),
        (["compare", "fedavg"], "at least two methods"),
        (["compare", "fedavg", "even", "--export", "table.docx"], "not as 'table.docx'"),
        (["compare", "fedavg", "even", "--export", "no/table.md"], "there is no folder 'no'"),
        (["compare", "fedavg", "even", "--set", "method.gamma=2"], "each method's settings with its name"),
        (["compare", "fedavg", "fairfed"], "fairfed looks at groups of people"),
        (["partitions", "pat:2", "--picture", "who.docx"], "a picture is written as .png"),
        (["partitions", "pat:2", "--picture", "no/who.png"], "cannot write to 'no/who.png'"),
        (["report", "nowhere"], "there is no folder 'nowhere'"),
        (["methods", "fedavgg"], "did you mean 'fedavg'?"),
        (["partitions", "pta:2"], "did you mean 'pat'?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(evenhand, arguments, said):
    code, printed, complained = evenhand(*arguments)
    assert (code, printed) == (2, "")
    assert complained.startswith("error: ")
    assert complained.count("\n") == 1
    assert said in complained
    assert list(Path().iterdir()) == []  # nothing is left behind


def test_an_unknown_option_is_exit_code_2(evenhand):
    code, _, complained = evenhand("run", "--round", "3")
    assert code == 2
    assert "--round" in complained


def test_a_finished_run_is_not_replaced_without_force(evenhand):
    evenhand("run", *SMALL, "--out", "here", "-q")
    code, _, complained = evenhand("run", *SMALL, "--out", "here", "-q")
    assert code == 2
    assert "--force" in complained
    assert evenhand("run", *SMALL, "--out", "here", "-q", "--force")[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(evenhand, monkeypatch, number, code):
    evenhand("run", *SMALL, "--out", "whole", "-q")

    @contextmanager
    def stopping(quiet, *rest):
        yield lambda status: os.kill(os.getpid(), number) if status.round == 2 else None

    monkeypatch.setattr(cli, "progress", stopping)
    left, said, complained = evenhand("run", *SMALL, "--out", "here")
    assert (left, said) == (code, "")
    assert "stopped after round 3 of 4; nothing is lost: evenhand run --resume here goes on" in complained
    monkeypatch.undo()
    Path("runs").mkdir(exist_ok=True)


def test_a_stopped_run_goes_on(evenhand, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:

        @contextmanager
        def stopping(quiet, *rest):
            yield lambda status: os.kill(os.getpid(), signal.SIGINT) if status.round == 2 else None

        patched.setattr(cli, "progress", stopping)
        evenhand("run", *SMALL, "--out", "here")
    code, said, complained = evenhand("run", "--resume", "here")
    assert code == 0
    assert "note: continued after round 3 of 4" in complained
    evenhand("run", *SMALL, "--out", "whole", "-q")
    assert Path("here/summary.json").read_bytes() == Path("whole/summary.json").read_bytes()
    assert "12 clients" in said


def test_a_comparison_prints_the_table(evenhand):
    arguments = ["compare", "fedavg", "qffl:q=1", *SMALL, "--seeds", "3", "--export", "a.tex", "--export", "b.csv"]
    code, said, complained = evenhand(*arguments)
    assert (code, complained) == (0, "")
    assert "| qffl:q=1 |" in said
    assert "**" in said
    assert "differs from fedavg" in said
    assert "runs/digits-compare-1" in said
    assert Path("a.tex").read_text() == Path("runs/digits-compare-1/table.tex").read_text()
    assert Path("b.csv").read_text().startswith("method,mean,mean_sd,")
    again = evenhand("compare", "--config", "runs/digits-compare-1/comparison.toml", "--json")[1]
    assert json.loads(again)["methods"]["qffl:q=1"]["mean"]["mean"] > 0
    first, second = (json.loads(Path(f"runs/digits-compare-{n}/summary.json").read_text()) for n in (1, 2))
    assert first == second
    code, said, _ = evenhand("report", "runs/digits-compare-1", "--out", "page.html")
    assert (code, said) == (0, "page.html\n")
    code, said, _ = evenhand("report", "runs/digits-compare-1/fedavg")
    assert said == "runs/digits-compare-1/fedavg/report.html\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('methods = ["fedavg", "even"]', "'my.toml' describes a comparison: evenhand compare --config my.toml"),
        ("lr = 0.2", "lr belongs to a part of the experiment: write it as work.lr"),
        ("colour = 3", "an experiment has no entry 'colour'"),
    ],
)
def test_a_wrong_description_is_explained(evenhand, text, said):
    Path("my.toml").write_text(text + "\n")
    code, _, complained = evenhand("run", "--config", "my.toml")
    assert code == 2
    assert said in complained


def test_a_folder_is_no_description(evenhand):
    evenhand("run", *SMALL, "--out", "here", "-q")
    code, _, complained = evenhand("run", "--config", "here")
    assert (code, complained) == (
        2,
        "error: 'here' is a folder, not a TOML file; did you mean 'here/experiment.toml'?\n",
    )


def test_what_was_finished_already_is_shown_again(evenhand):
    first = evenhand("run", *SMALL, "--out", "here")[1]
    code, said, complained = evenhand("run", "--resume", "here")
    assert (code, complained) == (0, "note: the run was finished already; this is what it found\n")
    assert said.splitlines()[:-2] == first.splitlines()[:-2]


def test_a_run_that_diverges_names_the_round_and_the_way_out(evenhand):
    code, said, complained = evenhand("run", "fedadam:eta=1e30", *SMALL)
    assert (code, said) == (2, "")
    assert complained.count("\n") == 1
    assert complained.startswith("error: fedadam diverged in round 2: ")
    assert "(--lr, now 0.1); what was measured before is in 'runs/digits-fedadam-1'" in complained
    assert Path("runs/digits-fedadam-1/seed-0/rounds.jsonl").is_file()
    code, said, complained = evenhand("compare", "fedavg", "fedadam:eta=1e30", *SMALL, "--seeds", "2")
    assert (code, complained) == (0, "")
    assert "| fedadam:eta=1e30 | diverged in round 2 |" in said


def test_the_demo_works(evenhand):
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^\t\$\(BIN\)/evenhand (compare .*)", text, flags=re.MULTILINE)
    assert "--rounds 100" in line
    code, said, _ = evenhand(*shlex.split(line.replace("--rounds 100", "--rounds 2")), "--seeds", "2")
    assert code == 0
    assert "Beyond chance, against fedavg:" in said
    assert said.splitlines()[-2].startswith("folder  runs/digits-compare-1")
    assert said.splitlines()[-1] == "report  runs/digits-compare-1/report.html  (open it in a browser)"


@pytest.mark.parametrize(
    ("command", "name"), [("methods", "fedfv"), ("datasets", "digits"), ("partitions", "pat"), ("models", "mlp")]
)
def test_what_there_is(evenhand, command, name):
    code, said, _ = evenhand(command)
    assert code == 0
    assert re.search(rf"^{name}", said, flags=re.MULTILINE)
    assert name in {entry["name"] for entry in json.loads(evenhand(command, "--json")[1])}


def test_one_method_and_one_partition(evenhand):
    assert "alpha = " in evenhand("methods", "fedfv")[1]
    listed = evenhand("methods")[1]
    assert all(f" {part}" in listed.partition("objective: fedavg:")[2] for part in [*SERVERS, *OBJECTIVES])
    said = evenhand("methods", "qffl")[1]
    assert "needs     losses, lr" in said
    assert "lipschitz = none" in said
    assert "Fair Resource Allocation" in said  # the paper and its equations
    code, said, _ = evenhand("partitions", "pat:2", "--clients", "5", "--limit", "3")
    assert code == 0
    assert "pat:2: 5 clients" in said
    assert "... and 2 more clients" in said
    found = json.loads(evenhand("partitions", "pat:2", "--clients", "5", "--json")[1])
    assert len(found["train"]) == len(found["labels"]) == 5


def test_one_data_set(evenhand):
    code, said, _ = evenhand("datasets", "synthetic-groups")
    assert code == 0
    assert said.startswith("synthetic-groups: FedFB's people")
    assert "options   samples = 5000\n          groups = 2\n" in said
    assert "y ~ Bernoulli(0.6)" in said
    assert "options" not in evenhand("datasets", "digits")[1]
    assert evenhand("datasets", "synthetic:1,1")[1].startswith("synthetic:ALPHA,BETA")
    assert evenhand("datasets", "my.csv")[1].startswith("PATH.csv")
    (only,) = json.loads(evenhand("datasets", "adult", "--json")[1])
    assert only["options"]["sensitive"] == "sex"
    code, _, complained = evenhand("datasets", "adlt")
    assert code == 2
    assert "did you mean 'adult'?" in complained


def test_tables_and_bars_on_a_terminal(evenhand, monkeypatch):
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True, raising=False)
    monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    code, said, complained = evenhand("compare", "fedavg", "even", *SMALL, "--seeds", "2")
    assert code == 0
    assert "fedavg" in said
    assert "|" not in said
    assert "mean" in complained
    assert "worst client" in complained
    assert "waiting" in complained  # the second method has its bar while the first one runs
    assert re.search(r"^ ?fedavg .* ±.*[▁▂▃▄▅▆▇█]", said, flags=re.MULTILINE)
    assert "On the Pareto front of mean accuracy and evenness: " in said
    code, said, _ = evenhand("run", "fedavg", *SMALL)
    assert code == 0
    assert re.search(r"^ ?fedavg .*[▁▂▃▄▅▆▇█]", said, flags=re.MULTILINE)
    assert "The worst client reaches " in said
    assert said.splitlines()[-1] == "report  runs/digits-fedavg-1/report.html  (open it in a browser)"
    assert evenhand("methods")[0] == 0


def test_a_narrow_terminal_cuts_nothing_off(evenhand, monkeypatch):
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    said = evenhand("datasets")[1]
    assert "\ndigits\n" in f"\n{said}"
    assert max(map(len, said.splitlines())) <= 60
    long = "fedmgda+:epsilon=0.25,reference=uniform"
    said = evenhand("compare", "fedavg", long, *SMALL, "--seeds", "2")[1]
    assert long in said
    assert "…" not in said


NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, x):
        return self.body(x)
"""


def test_a_network_in_the_folder_you_are_in(tmp_path):
    """Also from the installed command, which does not look for modules there by itself."""
    (tmp_path / "mine.py").write_text(NETWORK)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "command.py").write_text("from evenhand.cli import main\nmain()\n")
    options = [*SMALL, "--set", "model_options.width=3", "--json"]
    command = [sys.executable, "bin/command.py", "run", "--model", "mine:Net", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clients"] == 12


def test_it_runs_as_a_module_and_does_not_load_what_it_does_not_need():
    """Nor does it ask for a GPU while it is loaded: a process that has cannot be forked (evenhand.processes)."""
    code = (
        "import sys, torch; torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = None; "
        "import evenhand.cli, evenhand.running; "
        "print([m for m in ('pandas', 'matplotlib', 'sklearn', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    done = subprocess.run([sys.executable, "-m", "evenhand", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"evenhand {__version__}\n"
    code = "import sys; sys.modules['torch'] = None; import evenhand.cli; evenhand.cli.main(['run', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--participation" in done.stdout
