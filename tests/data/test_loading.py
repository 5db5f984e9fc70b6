"""Loading by name: what is built in, downloads, missing packages, the list of data sets, the Hugging Face door."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import threading
import types
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from official import idx, small, write_csv, write_mnist

import evenhand as eh
from evenhand.data import Dataset, datasets, leaf, load, partition, people, vision
from evenhand.data.files import Remote, Shelf, fetch


def test_digits_are_scikit_learns():
    loaded = pytest.importorskip("sklearn.datasets").load_digits()
    data = load("digits")
    np.testing.assert_allclose(data.inputs.reshape(-1, 64), loaded.data / 16.0)
    np.testing.assert_array_equal(data.targets, loaded.target)
    assert data.shape == (1, 8, 8)


def test_synthetic_follows_the_published_generator():
    data = load("synthetic:0.5,2", clients=1500, sigma=0.0)
    owner, x = data.columns["client"], data.inputs.numpy()
    assert {*np.bincount(owner)} == {54 + 50}  # int(e^4) + 50
    means = np.stack([x[start : start + 104].mean(axis=0) for start in range(0, len(x), 104)])
    # v_k ~ N(B_k, 1): spread 1 inside a client, and B_k ~ N(0, std beta) between clients.
    assert means.mean(axis=1).std() == pytest.approx(np.sqrt(2.0**2 + 1 / 60), rel=0.06)
    assert (means - means.mean(axis=1, keepdims=True))[:, 30:].std() == pytest.approx(1.0, rel=0.03)
    within = (x - np.repeat(means, 104, axis=0)).var(axis=0) * 104 / 103
    np.testing.assert_allclose(within, np.arange(1, 61) ** -1.2, rtol=0.03)


def test_synthetic_alpha_shifts_all_classes_alike():
    """The published generator adds u_k to every weight, so it never changes which class wins."""
    none, much = (load(f"synthetic:{alpha},1", clients=10, sigma=0.5) for alpha in (0, 3))
    torch.testing.assert_close(none.inputs, much.inputs)
    assert (none.targets == much.targets).float().mean() > 0.999


def rule_carries_over(data: Dataset, first: range, second: range) -> float:
    """How well a linear rule fitted on some clients predicts the labels of others."""
    owner = data.columns["client"]
    x = np.hstack([data.inputs.numpy(), np.ones((len(data), 1))])
    known, asked = np.isin(owner, first), np.isin(owner, second)
    rule, *_ = np.linalg.lstsq(x[known], np.eye(10)[data.labels[known]], rcond=None)
    return float(((x[asked] @ rule).argmax(axis=1) == data.labels[asked]).mean())


def test_iid_clients_share_one_rule_and_hybrid_ones_by_half():
    alike = load("synthetic-iid", clients=20, sigma=0.5)
    assert rule_carries_over(alike, range(10), range(10, 20)) > 0.6
    assert abs(alike.inputs.mean()) < 0.02
    hybrid = load("synthetic:1,1", clients=40, sigma=0.5, hybrid=True)
    assert rule_carries_over(hybrid, range(10), range(10, 20)) > 0.6
    assert rule_carries_over(hybrid, range(20, 30), range(30, 40)) < 0.45
    assert hybrid.inputs[hybrid.columns["client"] < 20].mean().abs() < 0.02


def test_synthetic_sizes_and_seed():
    data = load("synthetic:1,1")
    sizes = np.bincount(data.columns["client"])
    assert len(sizes) == 30
    assert sizes.min() >= 50
    assert sizes.max() > 5 * np.median(sizes)
    assert data.fingerprint() == load("synthetic:1,1").fingerprint() != load("synthetic:1,1", seed=1).fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fasion-mnist", {}, r"unknown data set 'fasion-mnist'; did you mean 'fashion-mnist'\? .* lists all 20"),
        ("synthetic", {}, "needs two numbers, such as synthetic:1,1"),
        ("synthetic:1", {}, "needs two numbers"),
        ("synthetic:1,x", {}, "needs two numbers"),
        ("synthetic:-1,1", {}, "alpha=-1.0 must be a number"),
        ("digits", {"standardise": True}, r"digits has no option 'standardise' \(its options: none\)"),
        ("synthetic:1,1", {"client": 3}, "has no option 'client'; did you mean 'clients'"),
        ("mnist", {"standardise": "yes"}, "standardise='yes' must be True or False"),
        ("hub:", {}, "unknown data set 'hub:'"),
    ],
)
def test_a_bad_name_or_option_is_explained(name, options, message):
    with pytest.raises(eh.EvenhandError, match=message):
        load(name, **options)


def test_the_list_of_data_sets_says_what_is_here(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist")
    monkeypatch.delenv("EVENHAND_DATA", raising=False)
    monkeypatch.setenv("EVENHAND_CACHE", str(tmp_path / "cache"))
    listed = {entry.name: entry for entry in datasets(tmp_path)}
    assert listed["mnist"].available == str(tmp_path / "mnist")
    assert listed["cifar10"].available == "no files"
    assert listed["synthetic-iid"].available == "yes"
    assert listed["mnist"].options == {"standardise": False}
    anywhere = {entry.name: entry for entry in datasets()}
    assert anywhere["mnist"].available == "on download"
    assert anywhere["femnist"].available == "no files"
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert {e.name: e.available for e in datasets()}["digits"] == "needs scikit-learn"
    lines = repr(datasets()).splitlines()
    assert len(lines) == 1 + len(anywhere)
    assert lines[0].split()[:3] == ["data", "set", "samples"]


@pytest.fixture
def server(tmp_path):
    """A web server for the files of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    (tmp_path / "web").mkdir()
    running = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/", tmp_path / "web"
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("pooch")
    monkeypatch.delenv("EVENHAND_DATA", raising=False)
    monkeypatch.setenv("EVENHAND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_official_files_are_downloaded_once_and_checked(server, cache, monkeypatch):
    url, web = server
    arrays = write_mnist(web)
    packed = {name: hashlib.md5((web / f"{name}.gz").read_bytes()).hexdigest() for name in arrays}
    contents = {name: hashlib.md5(idx(array)).hexdigest() for name, array in arrays.items()}
    small_mnist = replace(vision.MNIST, url=url, packed=packed, contents=contents, rows=(30, 10))
    monkeypatch.setattr(vision, "MNIST", small_mnist)
    first = load("mnist")
    assert first.source == str(cache / "mnist")
    for file in web.iterdir():
        file.unlink()
    assert load("mnist").fingerprint() == first.fingerprint()


def test_a_download_that_is_not_the_published_file_is_refused(server, cache):
    url, web = server
    (web / "a.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(
        eh.EvenhandError, match=r"could not download a.gz from http.*a.gz \(ValueError: .*put the file into"
    ):
        fetch(Remote("a.gz", url + "a.gz", "md5:" + "0" * 32), cache)
    assert not (cache / "a.gz").exists()
    with pytest.raises(eh.EvenhandError, match=r"could not download b.gz"):
        fetch(Remote("b.gz", url + "b.gz"), cache)
    assert fetch(Remote("a.gz", url + "a.gz"), cache).exists()


def test_nothing_is_downloaded_when_a_folder_is_named(server, cache, tmp_path, monkeypatch):
    url, web = server
    write_mnist(web)
    monkeypatch.setattr(vision, "MNIST", replace(vision.MNIST, url=url))
    (tmp_path / "mine").mkdir()
    with pytest.raises(eh.EvenhandError, match=r"mnist: no train-images-idx3-ubyte.gz, .* in .*/mine/mnist"):
        load("mnist", data_dir=tmp_path / "mine")
    assert not cache.exists()


def test_bank_is_taken_out_of_its_two_zip_files(server, cache, tmp_path, monkeypatch):
    url, web = server
    header = [*people.BANK_NUMBERS, "job", "marital", "education", "y"]
    rows = [[30 + i, i, 1, 100, 1, -1, 0, "maid", "single", "primary", "yes" if i % 3 else "no"] for i in range(12)]
    content = write_csv(tmp_path / "bank.csv", header, rows, delimiter=";").read_bytes()
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("bank-full.csv", content)
    with zipfile.ZipFile(web / "bank.zip", "w") as archive:
        archive.writestr("bank.zip", inner.getvalue())
    monkeypatch.setattr(people, "BANK_REMOTE", Remote("bank-marketing.zip", url + "bank.zip"))
    monkeypatch.setattr(people, "BANK_ROWS", 12)
    with pytest.raises(eh.EvenhandError, match=r"bank-full.csv has sha256 .* expected d1513ec6"):
        load("bank")
    monkeypatch.setattr(people, "BANK_CONTENT", hashlib.sha256(content).hexdigest())
    assert len(load("bank")) == 12
    assert (cache / "bank" / "bank-full.csv").read_bytes() == content


def test_shakespeare_is_downloaded_as_plain_text(server, cache, monkeypatch):
    url, web = server
    (web / "input.txt").write_text("ROMEO:\n" + "He jests at scars that never felt a wound. " * 20)
    digest = hashlib.sha256((web / "input.txt").read_bytes()).hexdigest()
    monkeypatch.setattr(leaf, "PLAYS", Remote("input.txt", url + "input.txt", f"sha256:{digest}"))
    assert {*load("shakespeare").columns["client"]} == {"ROMEO"}
    assert (cache / "shakespeare" / "input.txt").exists()


@pytest.mark.parametrize(
    ("module", "action", "message"),
    [
        (
            "sklearn",
            lambda folder: load("digits"),
            r"digits data set needs scikit-learn: pip install 'evenhand\[data\]'",
        ),
        ("pooch", lambda folder: fetch(Remote("f", "http://127.0.0.1:9/f"), folder), r"downloading f needs pooch"),
        ("datasets", lambda folder: load("hub:x/y"), r"hub:x/y needs datasets: pip install 'evenhand\[hub\]'"),
        (
            "matplotlib.figure",
            lambda folder: partition(small(), "iid").draw(small(), folder / "p.png"),
            "drawing a partition needs matplotlib",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(module, action, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(eh.EvenhandError, match=message):
        action(tmp_path)


def test_parquet_and_png_name_their_packages(tmp_path, monkeypatch):
    (tmp_path / "my.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(eh.EvenhandError, match=r"reading my.parquet needs pyarrow"):
        load(tmp_path / "my.parquet")
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / f"{name}.png").write_bytes(b"")
    for name in ("train_lables.json", "test_lables.json"):
        (tmp_path / name).write_text(json.dumps([]))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(eh.EvenhandError, match=r"CIFAR-10 as PNG files needs pillow"):
        load("cifar10", data_dir=tmp_path)


def test_the_data_room_needs_torch_numpy_and_scipy_alone():
    program = """
import sys
for name in ("sklearn", "pooch", "pandas", "pyarrow", "matplotlib", "PIL", "datasets", "tqdm", "requests"):
    sys.modules[name] = None
from evenhand.data import datasets, load, partition, partitions
data = load("synthetic:1,1", clients=10)
print(partition(data, "natural").table(data), datasets(), partitions())
assert not {"evenhand.methods", "evenhand.engine", "evenhand.aggregation"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "natural: 10 clients" in done.stdout


class HubSplit:
    """As much of a Hugging Face split as is used."""

    def __init__(self, columns: dict[str, list], names: list[str] | None = None) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.features = {name: types.SimpleNamespace(names=names if name == "label" else None) for name in columns}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        return self._columns[key] if isinstance(key, str) else {n: v[key] for n, v in self._columns.items()}


@pytest.fixture
def stub(monkeypatch):
    """A stand-in for the Hugging Face library."""
    content = {}

    def load_dataset(name, config=None):
        if name not in content:
            raise FileNotFoundError(f"no {name}\non the hub")
        return content[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return content


def test_hub_images_by_client(stub):
    def part(rows):
        images = [np.full((4, 5, 3), 10 * i, np.uint8) for i in range(rows)]
        labels = [i % 3 for i in range(rows)]
        return HubSplit(
            {"image": images, "label": labels, "writer": [f"w{i % 2}" for i in range(rows)]}, ["a", "b", "c"]
        )

    stub["team/letters"] = {"train": part(12), "test": part(6), "extra": part(3)}
    data = load("hub:team/letters", client_column="writer")
    assert load("hub:team/letters", sensitive="writer").groups()["writer"].values == ("w0", "w1")
    assert (data.shape, len(data), data.train_rows) == ((3, 4, 5), 18, 12)
    assert data.class_names == ("a", "b", "c")
    assert data.inputs[2, 0, 0, 0] == pytest.approx(20 / 255)
    assert partition(data, "natural").names == ("w0", "w1")
    assert data.source == "Hugging Face team/letters: train + test"


def test_hub_tables(stub):
    rows = {"age": [20, 30, None, 50], "sex": ["F", "M", "M", None], "label": [True, False, True, False]}
    stub["team/table"] = {"train": HubSplit(rows), "validation": HubSplit(rows)}
    data = load("hub:team/table", sensitive="sex")
    assert data.feature_names == ("age", "sex=F", "sex=M")
    assert data.groups()["sex"].values == ("F", "M", "unknown")
    assert (len(data), data.train_rows) == (8, 4)
    with pytest.raises(eh.EvenhandError, match="has no column 'writer'"):
        load("hub:team/table", client_column="writer")


def test_hub_failures_are_named(stub):
    with pytest.raises(eh.EvenhandError, match=r"hub:none could not be loaded \(FileNotFoundError: no none\)"):
        load("hub:none")
    stub["t"] = {"train": HubSplit({"text": ["a", "b"], "label": [0, 1]})}
    with pytest.raises(eh.EvenhandError, match="holds text; turn it into numbers first"):
        load("hub:t", input="text")
    stub["s"] = {"train": HubSplit({"image": [np.zeros((2, 2)), np.zeros((3, 2))], "label": [0, 1]})}
    with pytest.raises(eh.EvenhandError, match="inputs of different shapes"):
        load("hub:s")


def test_a_data_set_describes_itself_and_notices_changes():
    data = small(50, train_rows=40, columns={"site": np.arange(50)})
    assert data.describe() == "small: 50 samples, 5 classes, shape 1; official split 40 / 10; columns site"
    assert repr(data) == f"<Dataset {data.describe()}>"
    changed = data.inputs.clone()
    changed[7] += 1
    variants = [
        replace(data, inputs=changed),
        replace(data, targets=data.targets.flip(0)),
        replace(data, train_rows=39),
        replace(data, columns={"site": np.arange(50) + 1}),
    ]
    assert len({data.fingerprint(), *(v.fingerprint() for v in variants)}) == 5
    assert replace(data, source="elsewhere").fingerprint() == data.fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": torch.zeros(50, 1, dtype=torch.float64)}, "inputs must be float32 or int64"),
        ({"inputs": torch.zeros(49, 1)}, "49 inputs but 50 targets"),
        ({"targets": torch.full((50,), 5)}, "class numbers go from 5 to 5, expected 0 to 4"),
        ({"targets": torch.zeros(50)}, "int64 class number"),
        ({"class_names": ("a",)}, "1 class names for 5 classes"),
        ({"train_rows": 51}, "train_rows=51 of 50 rows"),
        ({"columns": {"site": np.zeros(3)}}, "column 'site' has 3 values for 50 samples"),
    ],
)
def test_an_inconsistent_data_set_is_refused(change, message):
    with pytest.raises(eh.EvenhandError, match=message):
        replace(small(50), **change)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(eh.EvenhandError, match="is not a folder"):
        Shelf.at(tmp_path / "nowhere")
