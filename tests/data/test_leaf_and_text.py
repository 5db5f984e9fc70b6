"""LEAF's JSON layout and plays as plain text: clients, windows, vocabularies, and what is wrong with a wrong file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official import write_leaf

import evenhand as eh
from evenhand.data import load, partition
from evenhand.data.text import ALPHABET, WINDOW, encode_characters, ordered_cut, speeches

ROMEO = "But soft, what light through yonder window breaks? It is the east, and Juliet is the sun. " * 15
JULIET = "O Romeo, Romeo, wherefore art thou Romeo? Deny thy father and refuse thy name. " * 12


def image(value: float) -> list[float]:
    return [value] * 784


def decoded(row) -> str:
    return "".join(ALPHABET[token] for token in row)


def next_characters(text: str) -> tuple[list[str], list[str]]:
    """A role's samples as LEAF writes them."""
    count = len(text) - WINDOW
    return [text[i : i + WINDOW] for i in range(count)], [text[i + WINDOW] for i in range(count)]


@pytest.mark.parametrize("inside", ["femnist", "femnist/data", "", "leaf/femnist"])
def test_femnist_train_and_test_files(tmp_path, inside):
    folder = tmp_path / inside
    write_leaf(folder / "train" / "a.json", {"w1": ([image(0.1), image(0.2)], [0, 61]), "w2": ([image(0.3)], [36])})
    write_leaf(folder / "train" / "b.json", {"w3": ([image(0.4)], [37])})
    write_leaf(folder / "test" / "a.json", {"w1": ([image(0.5)], [0]), "w2": ([image(0.6)], [10])})
    data = load("femnist", data_dir=tmp_path)
    assert (len(data), data.train_rows, data.classes, data.shape) == (6, 4, 62, (1, 28, 28))
    np.testing.assert_array_equal(data.columns["client"], ["w1", "w1", "w2", "w3", "w1", "w2"])
    np.testing.assert_allclose(data.inputs[:, 0, 5, 5], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert [data.class_names[c] for c in data.targets] == ["0", "z", "a", "b", "0", "A"]
    found = partition(data, "natural")  # LEAF's split is kept without asking
    assert found.names == ("w1", "w2", "w3")
    np.testing.assert_array_equal(found.test.sizes, [1, 1, 0])
    assert "1 of 3 clients (w3) has no test data" in found.notes


def test_femnist_without_a_split_and_with_some_classes(tmp_path):
    users = {f"w{i}": ([image(i / 10)] * 62, list(range(62))) for i in range(3)}
    write_leaf(tmp_path / "femnist" / "all_data" / "all_data_0.json", users)
    data = load("femnist", data_dir=tmp_path)
    assert (len(data), data.train_rows) == (186, None)
    some = load("femnist", data_dir=tmp_path, keep="a-j")
    assert some.class_names == tuple("abcdefghij")
    assert (len(some), some.classes) == (30, 10)


def test_sent140_words_become_numbers(tmp_path):
    def tweet(text):
        return ["1", "Sat May 16", "NO_QUERY", "someone", text]

    train = {"ann": ([tweet("I like it, I like it!"), tweet("So sad")], [1, 0]), "bob": ([tweet("like")], [1])}
    write_leaf(tmp_path / "sent140" / "train" / "t.json", train)
    write_leaf(tmp_path / "sent140" / "test" / "t.json", {"ann": ([tweet("unheard like")], [1])})
    data = load("sent140", data_dir=tmp_path, words=4, vocabulary=6)
    assert data.vocabulary == ("<pad>", "<unknown>", "like", "i", "it", "!")  # by frequency, in training rows only
    assert data.inputs.tolist() == [[3, 2, 4, 1], [1, 1, 0, 0], [2, 0, 0, 0], [1, 2, 0, 0]]
    assert data.class_names == ("negative", "positive")
    assert data.train_rows == 3


def test_shakespeare_from_leaf_keeps_its_split(tmp_path):
    (x, y), (u, v) = next_characters(ROMEO), next_characters(JULIET)
    write_leaf(tmp_path / "train" / "s.json", {"R": (x[:50], y[:50]), "J": (u[:40], v[:40])}, hierarchies=["RJ", "RJ"])
    write_leaf(tmp_path / "test" / "s.json", {"R": (x[200:], y[200:])}, hierarchies=["RJ"])
    data = load("shakespeare", data_dir=tmp_path)
    assert data.train_rows == 90
    assert decoded(data.inputs[3]) == ROMEO[3:83]
    assert ALPHABET[data.targets[3]] == ROMEO[83]
    assert {*data.columns["play"]} == {"RJ"}
    assert (data.classes, len(data.vocabulary)) == (80, 80)


@pytest.mark.parametrize("stride", [1, 7, 81])
@pytest.mark.parametrize("form", ["text", "json"])
def test_shakespeare_is_split_by_time_without_overlap(tmp_path, stride, form):
    if form == "text":
        lines = ROMEO.replace(". ", ".\n")
        (tmp_path / "input.txt").write_text(f"ROMEO:\n{lines}\n\nJULIET:\n{JULIET}\n\nNURSE:\nToo short.\n")
    else:
        roles = {"ROMEO": next_characters(ROMEO), "JULIET": next_characters(JULIET), "NURSE": ([], [])}
        write_leaf(tmp_path / "all_data" / "all_data.json", roles)
    data = load("shakespeare", data_dir=tmp_path, stride=stride)
    assert data.split == "official"
    assert "(1 of 3 roles are too short)" in data.source
    assert data.columns["client"][0] == "ROMEO"
    assert {*data.columns["client"]} <= {"ROMEO", "JULIET"}
    for row in range(len(data)):
        said = decoded(data.inputs[row]) + ALPHABET[data.targets[row]]
        spoken = ROMEO if data.columns["client"][row] == "ROMEO" else JULIET
        assert said in spoken + " "
    first = np.flatnonzero(data.columns["client"][: data.train_rows] == "ROMEO")
    assert decoded(data.inputs[first[-1]]) == ROMEO[stride * (len(first) - 1) :][:WINDOW]


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 2000), test=st.floats(0.05, 0.9), stride=st.integers(1, 100))
def test_no_test_target_lies_inside_a_training_window(count, test, stride):
    first, second = ordered_cut(count, test, stride)
    assert 1 <= first <= second <= count or second == count
    if second < count:
        last_training_character = (first - 1) * stride + WINDOW
        assert second * stride + WINDOW > last_training_character
        assert second * stride >= last_training_character  # the windows' inputs do not overlap either
        assert (second - 1) * stride < last_training_character  # and no more is left out than needed


def test_leafs_own_gap_for_stride_one():
    assert ordered_cut(1000, 0.2, 1) == (800, 879)  # its script: test from num_train + 80 - 1


def test_the_alphabet_is_leafs():
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert decoded(encode_characters("Alas, 'tis 9:30!\n")) == "Alas, 'tis 9:30!\n"
    assert encode_characters("$é漢").tolist() == [79, 79, ALPHABET.index("?")]


def test_roles_speak_in_order_and_the_silent_are_left_out():
    spoken = speeches("A:\none\ntwo\n\nB:\nthree\n\nA:\nfour\n\nGHOST:\n\nB:\nfive", "play")
    assert spoken == {"A": "one\ntwo\nfour", "B": "three\nfive"}
    with pytest.raises(eh.EvenhandError, match="play: block 2 begins with 'no speaker here', expected a speaker"):
        speeches("A:\none\n\nno speaker here\nat all", "play")
    with pytest.raises(eh.EvenhandError, match="holds no speeches"):
        speeches("", "play")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["a"], "num_samples": [1], "user_da', "bad.json is truncated or not JSON"),
        ("[1, 2]", "bad.json is not a LEAF file: expected the keys users, num_samples and user_data"),
        (json.dumps({"users": ["a"], "user_data": {}}), "bad.json: user 'a' has no x and y"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0] * 784], "y": []}}}), "1 inputs but 0 labels"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0] * 7], "y": [1]}}}), "lists of 784 numbers"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0] * 784], "y": [62]}}}), "class numbers 0 to 61"),
        (json.dumps({"users": [], "user_data": {}}), "holds no samples"),
    ],
)
def test_a_bad_leaf_file_is_named(tmp_path, content, message):
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data" / "bad.json").write_text(content)
    with pytest.raises(eh.EvenhandError, match=message):
        load("femnist", data_dir=tmp_path)


def test_other_bad_texts_are_named(tmp_path):
    write_leaf(tmp_path / "all_data" / "s.json", {"R": (["too short"], ["x"])})
    with pytest.raises(eh.EvenhandError, match="user 'R': expected strings of 80 characters"):
        load("shakespeare", data_dir=tmp_path)
    write_leaf(tmp_path / "all_data" / "s.json", {"ann": ([["1", "2"]], [1])})
    with pytest.raises(eh.EvenhandError, match=r"user 'ann': a tweet must be \[id, date"):
        load("sent140", data_dir=tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "input.txt").write_bytes(b"ROMEO:\n\xff\xfe")
    with pytest.raises(eh.EvenhandError, match=r"input.txt is not a text file .* at byte 7"):
        load("shakespeare", data_dir=tmp_path / "text")
    (tmp_path / "text" / "input.txt").write_text("ROMEO:\nAy me!")
    with pytest.raises(eh.EvenhandError, match=r"no role in .* is long enough"):
        load("shakespeare", data_dir=tmp_path / "text")


def test_missing_leaf_files_come_with_advice(tmp_path):
    with pytest.raises(eh.EvenhandError, match=r"femnist: no all_data/\*.json, .* make them with LEAF's data/femnist/"):
        load("femnist", data_dir=tmp_path)
