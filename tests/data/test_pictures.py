"""CINIC-10 and Tiny ImageNet, a picture a file: the same unpacked and in their archives; what is amiss is named."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from official import write_archive, write_files

import evenhand as eh
from evenhand.data import datasets, load, partition, pictures
from evenhand.data.files import Tree

KINDS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ONE_CAT, ONE_FISH = "test/cat/cifar10-test-4.png", "train/n01/images/n01_0.JPEG"
ANNOTATIONS = "val/val_annotations.txt"
WORDS = {"n03": "Egyptian cat", "n01": "goldfish, Carassius auratus", "n02": "bullfrog, Rana catesbeiana"}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """The loaders, expecting small sets whose checksums nobody has published."""
    for name, sizes in (("CINIC10", {"each": (2, 1, 1)}), ("TINY_IMAGENET", {"each": (2, 1), "classes": 3})):
        official = getattr(pictures, name)
        archive = replace(official.archive, checksum=None)
        monkeypatch.setattr(pictures, name, replace(official, archive=archive, **sizes))
    monkeypatch.delenv("EVENHAND_DATA", raising=False)


def picture(value: int, side: int, form: str = "PNG", mode: str = "RGB") -> bytes:
    """One colour all over (red, green and blue differ by ten), which survives JPEG within a step or two."""
    image = pytest.importorskip("PIL.Image")
    colour = (value, value + 10, value + 20) if mode == "RGB" else value
    stream = io.BytesIO()
    image.new(mode, (side, side), colour).save(stream, form, **({"quality": 100} if form == "JPEG" else {}))
    return stream.getvalue()


def cinic_files() -> dict[str, bytes]:
    """Two, one and one picture of each class; their colour says which part and class they are of. One is grey."""
    files = {"README.md": b"# CINIC-10", "train/cat/.DS_Store": b"hidden"}
    for part, names in (("train", ("cifar10-train-9", "n01_2")), ("valid", ("n01_1",)), ("test", ("cifar10-test-4",))):
        for number, kind in enumerate(KINDS):
            for copy, name in enumerate(names):
                value = 10 * number + copy + 100 * (part == "test")
                mode = "L" if (part, kind) == ("valid", "dog") else "RGB"
                files[f"{part}/{kind}/{name}.png"] = picture(value, 32, mode=mode)
    return files


def tiny_files() -> dict[str, bytes]:
    """Two and one picture of each of three classes, and one of the test set, whose class is not published."""
    files = {
        f"train/{kind}/images/{kind}_{i}.JPEG": picture(60 * k + i, 64, "JPEG")
        for k, kind in enumerate(WORDS)
        for i in (0, 1)
    }
    files |= {f"train/{kind}/{kind}_boxes.txt": b"n03_0.JPEG\t0\t0\t63\t63" for kind in WORDS}
    files |= {f"val/images/val_{i}.JPEG": picture(50 + i, 64, "JPEG", mode="L") for i in range(3)}
    files["test/images/test_0.JPEG"] = picture(0, 64, "JPEG")
    files["wnids.txt"] = "\n".join(WORDS).encode()
    files["words.txt"] = "".join(f"{k}\t{v}\n" for k, v in {"n00": "entity", **WORDS}.items()).encode()
    files[ANNOTATIONS] = b"val_0.JPEG\tn02\t0\t32\t44\t62\nval_1.JPEG\tn01\t0\t0\t9\t9\nval_2.JPEG\tn03\t1\t1\t8\t8\n"
    return files


def write_zip(path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("tiny-imagenet-200")
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)


@pytest.mark.parametrize(
    "form", ["bare", "cinic10/", "CINIC-10/", "cinic10/CINIC-10/", "archive", "archive with a top"]
)
def test_cinic10_is_the_same_in_all_its_forms(tmp_path, form):
    files = cinic_files()
    if "archive" in form:
        top = "./" if form == "archive" else "CINIC-10/"
        mixed = dict(sorted(files.items(), key=lambda entry: entry[0][::-1]))  # in no order of ours
        write_archive(tmp_path / "cinic10" / "CINIC-10.tar.gz", {top + name: raw for name, raw in mixed.items()})
    else:
        write_files(tmp_path / form.replace("bare", ""), files)
    data = load("cinic10", data_dir=tmp_path, normalise=False)
    assert data.class_names == KINDS
    assert (len(data), data.train_rows, data.shape) == (40, 30, (3, 32, 32))
    np.testing.assert_array_equal(data.targets, [*np.repeat(range(10), 2), *range(10), *range(10)])
    values = np.array([10 * n + copy for n in range(10) for copy in (0, 1)] + [10 * n for n in range(10)])
    red = np.concatenate([values, 100 + 10 * np.arange(10)])
    expected = (red[:, None] + [0, 10, 20]) / 255.0
    expected[25] = 50 / 255.0  # the grey dog
    np.testing.assert_allclose(data.inputs[:, :, 5, 9], expected, atol=1e-6)
    assert data.source.endswith("(archive)" if "archive" in form else "(unpacked)")


@pytest.mark.parametrize(
    "form", ["tiny-imagenet/", "tiny-imagenet-200/", "tiny-imagenet/tiny-imagenet-200/", "archive"]
)
def test_tiny_imagenet_is_the_same_in_all_its_forms(tmp_path, form):
    if form == "archive":
        write_zip(tmp_path / "tiny-imagenet-200.zip", tiny_files())
    else:
        write_files(tmp_path / form, tiny_files())
    data = load("tiny-imagenet", data_dir=tmp_path, normalise=False)
    assert data.class_names == ("Egyptian cat", "goldfish", "bullfrog")  # in the order of wnids.txt
    assert (len(data), data.train_rows, data.shape) == (9, 6, (3, 64, 64))
    np.testing.assert_array_equal(data.targets, [0, 0, 1, 1, 2, 2, 0, 1, 2])
    red = np.array([0, 1, 60, 61, 120, 121, 52, 51, 50])
    np.testing.assert_allclose(data.inputs[:, 0, 7, 40] * 255, red, atol=3)
    np.testing.assert_allclose(data.inputs[6:, 2, 7, 40] * 255, red[6:], atol=3)  # grey ones have three channels alike
    assert len(partition(data, "iid", clients=2, pool="train").train.indices) < 6


def test_pixels_are_normalised_with_the_sets_own_constants(tmp_path):
    write_files(tmp_path / "cinic10", cinic_files())
    write_files(tmp_path / "tiny-imagenet", tiny_files())
    for name, which in (("cinic10", pictures.CINIC10), ("tiny-imagenet", pictures.TINY_IMAGENET)):
        plain = load(name, data_dir=tmp_path, normalise=False).inputs
        for channel in range(3):
            expected = (plain[:, channel] - which.mean[channel]) / which.deviation[channel]
            np.testing.assert_allclose(load(name, data_dir=tmp_path).inputs[:, channel], expected, atol=1e-5)


def changed(files: dict[str, bytes], path: str, content: bytes | None) -> dict[str, bytes]:
    """The files with another content at a path; None takes all away that begins so."""
    kept = {name: raw for name, raw in files.items() if not name.startswith(path)}
    return kept if content is None else {**kept, path: content}


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("valid/airplane/", None, r"cinic10: no valid/airplane/ in .*put the official files there \(https:"),
        ("test/cat/", None, "test holds 0 pictures of cat, expected 1; unpack CINIC-10.tar.gz anew"),
        ("train/cat/n01_2.png", None, "train holds 1 pictures of cat, expected 2"),
        ("test/cat/copy.png", picture(0, 32), "test holds 2 pictures of cat, expected 1"),
        ("test/kitten/n1.png", b"", r"test/kitten/n1.png is of no class of CINIC-10 \(airplane, auto.*take it out"),
        (ONE_CAT, picture(0, 31), "test-4.png is a picture of 31 x 31 pixels, expected 32 x 32"),
        (ONE_CAT, picture(0, 32)[:60], "test-4.png is truncated or not a picture"),
        (ONE_CAT, b"<html>", "test-4.png is truncated or not a picture"),
        (ONE_CAT, b"", "test-4.png is truncated or not a picture"),
    ],
)
def test_what_is_amiss_in_cinic10_is_named(tmp_path, path, content, message):
    write_files(tmp_path / "cinic10", changed(cinic_files(), path, content))
    with pytest.raises(eh.EvenhandError, match=message):
        load("cinic10", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("words.txt", None, r"tiny-imagenet: no words.txt in .*put the official files there \(http:"),
        ("wnids.txt", b"n03\nn01", "wnids.txt names 2 classes in 2 words, expected 3, each once"),
        ("wnids.txt", b"n03\nn01\nn01", "wnids.txt names 2 classes in 3 words"),
        ("wnids.txt", b"\xff\xfe", "wnids.txt is not a text file"),
        ("words.txt", b"n03\tcat\nn02\tfrog\n", "words.txt does not say what n01 is"),
        ("train/n01/", None, "train holds 0 pictures of n01, expected 2; unpack tiny-imagenet-200.zip anew"),
        ("train/n09/images/n09_0.JPEG", b"", "n09_0.JPEG is of no class in wnids.txt"),
        (ONE_FISH, picture(0, 32, "JPEG"), "n01_0.JPEG is a picture of 32 x 32 pixels, expected 64 x 64"),
        (ONE_FISH, picture(0, 64, "JPEG")[:-200], "n01_0.JPEG is truncated or not a picture"),
        ("val/images/val_1.JPEG", None, "no val/images/val_1.JPEG, which val_annotations.txt names"),
        ("val/images/val_3.JPEG", b"", "val_annotations.txt does not say what val/images/val_3.JPEG shows"),
        (ANNOTATIONS, b"val_0.JPEG\tn09\t0", "line 1: val_0.JPEG is of the class 'n09', which is not in wnids.txt"),
        (ANNOTATIONS, b"val_0.JPEG n01", "line 1: expected a file and its class with a tab between them"),
        (ANNOTATIONS, b"v\tn01\nv\tn02", "line 2: v has a class already"),
    ],
)
def test_what_is_amiss_in_tiny_imagenet_is_named(tmp_path, path, content, message):
    write_files(tmp_path / "tiny-imagenet", changed(tiny_files(), path, content))
    with pytest.raises(eh.EvenhandError, match=message):
        load("tiny-imagenet", data_dir=tmp_path)


def test_an_archive_is_checked_before_it_is_used(tmp_path, monkeypatch):
    tar, packed = tmp_path / "CINIC-10.tar.gz", tmp_path / "tiny-imagenet-200.zip"
    write_archive(tar, cinic_files())
    write_zip(packed, {name: raw for name, raw in tiny_files().items() if name != "words.txt"})
    with pytest.raises(eh.EvenhandError, match=r"tiny-imagenet-200.zip does not hold words.txt"):
        load("tiny-imagenet", data_dir=tmp_path)
    for path, name in ((tar, "cinic10"), (packed, "tiny-imagenet")):
        path.write_bytes(path.read_bytes()[:-400])
        with pytest.raises(eh.EvenhandError, match=f"{path.name} is truncated or not an archive"):
            load(name, data_dir=tmp_path)
    published = replace(pictures.CINIC10.archive, checksum="md5:6ee4d0c996905fe93221de577967a372")
    monkeypatch.setattr(pictures, "CINIC10", replace(pictures.CINIC10, archive=published))
    with pytest.raises(eh.EvenhandError, match=r"is not the published file: its md5 is .* expected 6ee4d0c99690"):
        load("cinic10", data_dir=tmp_path)


def test_a_damaged_file_in_a_zip_archive_is_noticed(tmp_path):
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
    path.write_bytes(path.read_bytes().replace(b"hello", b"hallo"))
    assert Tree(path).names() == ["a.txt"]
    with pytest.raises(eh.EvenhandError, match=r"some.zip is truncated or not an archive \(Bad CRC-32"):
        list(Tree(path).read(["a.txt"]))


def test_the_list_says_where_the_pictures_are_and_what_they_need(tmp_path, monkeypatch):
    write_files(tmp_path / "cinic10", cinic_files())
    write_files(tmp_path / "tiny-imagenet" / "tiny-imagenet-200", tiny_files())
    here = {entry.name: entry for entry in datasets(tmp_path)}
    assert here["cinic10"].available == str(tmp_path / "cinic10")
    assert here["tiny-imagenet"].available == str(tmp_path / "tiny-imagenet" / "tiny-imagenet-200")
    assert "`val` the test rows" in here["tiny-imagenet"].details
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(eh.EvenhandError, match=r"CINIC-10 needs pillow: pip install 'evenhand\[data\]'"):
        load("cinic10", data_dir=tmp_path)
    with pytest.raises(eh.EvenhandError, match="normalise=1 must be True or False"):
        load("cinic10", data_dir=tmp_path, normalise=1)


@pytest.mark.parametrize("name", ["cinic10", "tiny-imagenet"])
def test_the_published_sets_have_the_published_numbers_of_pictures(name, monkeypatch):
    monkeypatch.undo()
    which = {"cinic10": pictures.CINIC10, "tiny-imagenet": pictures.TINY_IMAGENET}[name]
    listed = datasets(name=name)[0]
    assert listed.samples == f"{which.classes * sum(which.each):,}"
    assert listed.shape == f"3x{which.side}x{which.side}"
    assert listed.classes == str(which.classes)
