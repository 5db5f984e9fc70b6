"""Partitions: nobody's sample twice, everything used, the papers' facts, the limits of each kind."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from official import balanced, small

import evenhand as eh
from evenhand.data import Dataset, partition, partitions

DISJOINT = [
    "iid",
    "pat:2",
    "pat:2,pairing=block",
    "pat:2,balance=false",
    "shards:2",
    "dir:0.3",
    "dir:0.3,cap=none",
    "dir:0.3,per=client",
]
DISJOINT += ["dir:0.3,per=client,balance=false", "sizes:lognormal", "natural:site", "shares:high,by=sex"]


def people(samples: int = 300, classes: int = 5, seed: int = 0, **more) -> Dataset:
    """A small data set whose samples have a site and a sex."""
    rng = np.random.default_rng(seed + 1)
    columns = {"site": rng.choice(["a", "b", "c", "d"], samples), "sex": rng.choice(["F", "M"], samples)}
    return small(samples, classes, seed, columns=columns, **more)


def count_for(spec: str, clients: int) -> int | None:
    return None if spec.startswith(("natural", "shares")) else clients


def all_indices(found) -> np.ndarray:
    return np.concatenate([found.train.indices, found.validation.indices, found.test.indices])


@settings(max_examples=150, deadline=None)
@given(
    spec=st.sampled_from(DISJOINT),
    samples=st.integers(10, 400),
    classes=st.integers(2, 8),
    clients=st.integers(1, 30),
    split=st.sampled_from([(0.8, 0.0, 0.2), (0.8, 0.1, 0.1), (6 / 7, 0.0, 1 / 7), (1.0, 0.0, 0.0), (0.4, 0.3, 0.3)]),
    seed=st.integers(0, 5),
)
def test_every_sample_has_one_client_and_one_part(spec, samples, classes, clients, split, seed):
    assume("block" not in spec or 2 * clients >= classes)
    data = people(samples, classes, seed)
    found = partition(data, spec, clients=count_for(spec, clients), split=split, seed=seed)
    everything = all_indices(found)
    assert len(np.unique(everything)) == len(everything)
    if not spec.startswith("pat"):  # a few clients cannot hold many classes
        assert len(everything) == samples
    for part in (found.train, found.validation, found.test):
        assert len(part) == found.clients
        assert part.indices.dtype == part.offsets.dtype == np.int64
        assert part.sizes.sum() == len(part.indices)
    sizes = found.sizes
    assert (found.train.sizes[sizes > 0] > 0).all()
    if split[2] > 0:
        assert (found.test.sizes[sizes > 1] > 0).all()
    exact = np.floor(sizes * split[2] + 0.5)
    assert (np.abs(found.test.sizes - exact) <= 1).all()


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(DISJOINT),
    samples=st.integers(50, 600),
    share=st.sampled_from([0.1, 0.2, 0.25, 1 / 3]),
    seed=st.integers(0, 9),
)
def test_a_clients_test_labels_are_its_training_labels(spec, samples, share, seed):
    data = people(samples, 4, seed)
    found = partition(data, spec, clients=count_for(spec, 6), split=(1 - share, 0.0, share), seed=seed)
    held, tested = found.label_counts(data), found.label_counts(data, "test")
    enough = held >= 1 / share
    assert (tested[enough] > 0).all()
    assert (tested[enough] < held[enough]).all()
    expected = held * (found.test.sizes / np.maximum(found.sizes, 1))[:, None]
    assert (np.abs(tested - expected) <= 1.5).all()


@pytest.mark.parametrize("spec", [*DISJOINT, "bootstrap:20"])
def test_the_seed_decides(spec):
    data, clients = people(), count_for(spec, 7)
    once, again = (partition(data, spec, clients=clients, seed=3) for _ in range(2))
    other = partition(data, spec, clients=clients, seed=4)
    assert once.fingerprint() == again.fingerprint()
    assert once.fingerprint() != other.fingerprint()


def test_the_split_draws_from_its_own_stream():
    data = people()
    narrow, wide = (partition(data, "dir:0.5", clients=6, split=s) for s in ((0.9, 0.0, 0.1), (0.5, 0.2, 0.3)))
    for client in range(6):
        held = [
            np.sort(np.concatenate([p.train[client], p.validation[client], p.test[client]])) for p in (narrow, wide)
        ]
        np.testing.assert_array_equal(*held)


def test_samples_come_in_random_order():
    found = partition(balanced(2, 500), "iid", clients=1)
    assert np.corrcoef(found.train[0], np.arange(800))[0, 1] < 0.2
    assert len(np.flatnonzero(np.diff(balanced(2, 500).labels[found.train[0]]))) > 300


def test_a_split_is_a_view_per_client():
    found = partition(small(100), "iid", clients=7)
    assert sum(len(found.train[client]) for client in range(7)) == len(found.train.indices)
    np.testing.assert_array_equal(found.train[-1], found.train[6])
    assert np.shares_memory(found.train[2], found.train.indices)
    with pytest.raises(IndexError):
        found.train[7]


@settings(max_examples=80, deadline=None)
@given(
    classes=st.integers(2, 12),
    each=st.integers(1, 12),
    clients=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_pat_gives_every_client_exactly_its_number_of_classes(classes, each, clients, seed):
    each = min(each, classes)
    data = balanced(classes, 5 * clients * each)
    found = partition(data, f"pat:{each}", clients=clients, seed=seed)
    assert ((found.label_counts(data) > 0).sum(axis=1) == each).all()
    if clients * each >= classes:
        assert found.sizes.sum() == len(data)
    if clients * each % classes == 0:
        assert found.sizes.min() == found.sizes.max()


def test_pat_pairs_classes_at_random_and_in_blocks_only_when_asked():
    data = balanced(10, 700)
    kinds = {}
    for pairing in ("random", "block"):
        held = partition(data, "pat:2", clients=100, pairing=pairing).label_counts(data) > 0
        kinds[pairing] = np.unique(held, axis=0)
        if pairing == "block":  # FedLF's code: clients 0-19 hold {0, 1}, 20-39 hold {2, 3}, ...
            for block in range(5):
                assert held[20 * block : 20 * (block + 1), [2 * block, 2 * block + 1]].all()
    assert len(kinds["block"]) == 5
    assert len(kinds["random"]) > 25


def test_unbalanced_pat_gives_the_last_of_a_class_what_the_others_leave():
    data = balanced(10, 7000)
    held = partition(data, "pat:2", clients=100, pairing="block", balance=False).label_counts(data)
    for label, of_class in enumerate(held.T):
        first = 20 * (label // 2)
        others, last = of_class[first : first + 19], of_class[first + 19]
        assert others.min() >= 35
        assert others.max() < 350
        assert others.max() > 2 * others.min()
        assert last == 7000 - others.sum() > 2000
    assert (partition(balanced(5, 3), "pat:1", clients=10, balance=False).sizes <= 2).all()  # too few to differ


def test_blocks_need_room_for_every_class():
    with pytest.raises(eh.EvenhandError, match="4 clients cannot hold 10 classes"):
        partition(balanced(10, 10), "pat:2", clients=4, pairing="block")


def test_pat_follows_unequal_classes():
    labels = torch.from_numpy(np.repeat([0, 1, 2], [800, 300, 100]))
    data = Dataset("uneven", torch.zeros(1200, 1), labels, 3)
    found = partition(data, "pat:1", clients=12)
    assert (found.sizes == 100).all()


def test_fedfv_shards():
    data = balanced(10, 5000)
    found = partition(data, "shards:2", clients=100, split=(0.8, 0.1, 0.1))
    held = found.label_counts(data)
    assert (held.sum(axis=1) == 500).all()
    assert set(held[held > 0]) == {250, 500}
    assert set((held > 0).sum(axis=1)) == {1, 2}
    assert {*found.train.sizes} == {400}
    assert {*found.validation.sizes} == {*found.test.sizes} == {50}


def test_fedlf_sizes():
    found = partition(balanced(10, 700), "pat:2", clients=10, split=(6 / 7, 0.0, 1 / 7))
    assert {*found.train.sizes} == {600}
    assert {*found.test.sizes} == {100}


@pytest.mark.parametrize("per", ["class", "client"])
def test_dirichlet_limits(per):
    data = balanced(10, 400)
    even = partition(data, "dir:100000", clients=20, per=per).label_counts(data)
    assert (np.abs(even - 20) <= 3).all()
    skewed = partition(data, "dir:0.01", clients=20, per=per, min_size=1).label_counts(data)
    largest = skewed.max(axis=1) / skewed.sum(axis=1)
    assert np.median(largest) > 0.75
    between = partition(data, "dir:0.5", clients=20, per=per).label_counts(data)
    assert even.std() < between.std() < skewed.std()


def test_dirichlet_stops_feeding_a_full_client_unless_told():
    data = balanced(10, 1000)
    capped = partition(data, "dir:0.3", clients=20).sizes
    free = partition(data, "dir:0.3", clients=20, cap=None, min_size=0).sizes
    assert capped.std() < free.std()
    assert capped.min() >= 10  # FedLF: at least as many samples as classes


def test_dirichlet_per_client_keeps_sizes_equal_or_not():
    data = balanced(10, 1000)
    equal = partition(data, "dir:0.3", clients=20, per="client").sizes
    assert equal.max() - equal.min() <= 20
    free = partition(data, "dir:0.3", clients=20, per="client", balance=False, min_size=0).sizes
    assert free.max() > 3 * free.min()


def test_lognormal_sizes_have_the_published_spread():
    data = balanced(10, 20_000)
    for sigma in (0.5, 1.0):
        sizes = partition(data, "sizes:lognormal", clients=400, sigma=sigma, base=0).sizes
        assert np.log(sizes).std() == pytest.approx(sigma, rel=0.1)
    held = partition(data, "sizes:lognormal", clients=20).label_counts(data)
    big = held[held.sum(axis=1) > 2000]
    assert (np.abs(big / big.sum(axis=1, keepdims=True) - 0.1) < 0.03).all()  # labels stay iid
    assert partition(data, "sizes:lognormal", clients=400, min_size=40).sizes.min() >= 40


@pytest.mark.parametrize(
    ("spec", "table"),
    [
        ("shares:low", [[30, 30, 20, 10, 10], [10, 20, 20, 20, 30]]),
        ("shares:high", [[50, 10, 10, 20, 10], [10, 40, 30, 10, 10]]),
        ("shares:0.25/0.75,1/0", [[25, 75], [100, 0]]),
        ("shares:M=20/80,F=80/20", [[80, 20], [20, 80]]),
        ("shares:F=80/20,*=20/80", [[80, 20], [20, 80]]),
    ],
)
def test_shares_are_reproduced(spec, table):
    sex = np.repeat(["F", "M"], [1000, 2000])
    data = small(3000, columns={"sex": sex}, sensitive=("sex",))
    found = partition(data, spec)
    for client in range(found.clients):
        held = np.concatenate([found.train[client], found.test[client]])
        shares = [100 * (sex[held] == s).sum() / (sex == s).sum() for s in ("F", "M")]
        np.testing.assert_allclose(shares, [row[client] for row in table], atol=0.1)


def test_mfairfls_tables_give_the_smallest_group_the_first_row():
    rng = np.random.default_rng(0)
    race = rng.choice(["a", "b", "c", ""], 5000, p=[0.6, 0.15, 0.24, 0.01])
    sex = rng.choice(["F", "M"], 5000)
    data = small(5000, columns={"race": race, "sex": sex}, sensitive=("race", "sex"))
    groups = data.groups()
    found = partition(data, "shares:high")  # the first attribute decides
    assert groups["race"].values == ("a", "b", "c", "unknown")
    held = found.group_counts(groups["race"]) / groups["race"].counts
    np.testing.assert_allclose(held[:, 1], [0.5, 0.1, 0.1, 0.2, 0.1], atol=0.01)
    for others in (0, 2):
        np.testing.assert_allclose(held[:, others], [0.1, 0.4, 0.3, 0.1, 0.1], atol=0.01)
    crossed = partition(data, "shares:high,by=sex+race")
    held = crossed.group_counts(data.groups("sex,race").joint) / data.groups("sex,race").joint.counts
    assert np.isclose(held[0], 0.5, atol=0.01).sum() == 1
    assert partition(data, "shares:low,by=sex").clients == 5
    found_by_name = partition(data, "shares:b=50/10/10/20/10,*=10/40/30/10/10")
    assert found_by_name.fingerprint() == found.fingerprint()


def test_natural_clients_have_names_and_can_be_chosen():
    site = np.repeat(["north", "east", "west", ""], [50, 30, 15, 5])
    data = small(100, columns={"site": site, "client": site})
    found = partition(data, "natural:site")
    assert found.names == ("(missing)", "east", "north", "west")
    np.testing.assert_array_equal(found.sizes, [5, 30, 50, 15])
    assert set(site[found.train[2]]) == {"north"}
    assert partition(data, "natural").fingerprint() == found.fingerprint()
    large = partition(data, "natural:site", min_size=20)
    assert large.names == ("east", "north")
    assert any("fewer than min_size=20" in note for note in large.notes)
    assert partition(data, "natural:site", clients=2).clients == 2
    with pytest.raises(eh.EvenhandError, match="has 4 clients, not clients=9"):
        partition(data, "natural:site", clients=9)


def test_bootstrap_clients_share_samples_but_never_a_test_sample_with_training():
    data = small(500)
    found = partition(data, "bootstrap:30", clients=400)
    assert {*found.sizes} == {30}
    assert not set(found.train.indices) & set(found.test.indices)
    assert len(np.unique(found.train.indices)) == 400  # 80 % of the pool, used by all
    assert any("share samples" in note for note in found.notes)
    official = partition(small(500, train_rows=400), "bootstrap:30", clients=400, split="official")
    assert official.train.indices.max() < 400 <= official.test.indices.min()


def test_a_million_clients():
    samples = 1_500_000
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 10, samples))
    data = Dataset("many", torch.zeros(samples, 1), labels, 10)
    for spec, limit in (("bootstrap:10", 5.0), ("iid", 12.0), ("sizes:lognormal", 12.0)):
        started = time.perf_counter()
        found = partition(data, spec, clients=1_000_000)
        assert time.perf_counter() - started < limit
        assert found.clients == len(found.train) == 1_000_000


def test_the_official_test_set_can_be_kept_apart():
    data = people(400, train_rows=300)
    found = partition(data, "natural:site", split="official:0.1")
    assert set(found.test.indices) == set(range(300, 400))
    assert found.train.indices.max() < 300
    np.testing.assert_allclose(found.validation.sizes / (found.validation.sizes + found.train.sizes), 0.1, atol=0.02)
    assert all_indices(partition(data, "iid", clients=5, pool="train")).max() == 299
    with pytest.raises(eh.EvenhandError, match="no official test set"):
        partition(data, "iid", split="official", pool="train")
    with pytest.raises(eh.EvenhandError, match="no official training set"):
        partition(small(), "iid", pool="train")


def test_a_data_set_may_ask_for_its_official_split():
    data = people(400, train_rows=300, split="official")
    assert set(partition(data, "iid", clients=4).test.indices) == set(range(300, 400))
    assert len(partition(data, "iid", clients=4, pool="train").test.indices) == 60


def test_empty_clients_and_clients_without_test_data_are_named():
    found = partition(small(4, classes=2), "iid", clients=6)
    assert "2 of 6 clients (4, 5) have no training data" in found.notes
    assert "4 of 6 clients (0, 1, 2, 3) have no test data" in found.notes
    assert found.train.sizes.sum() == 4
    single = partition(small(9, classes=2), "iid", clients=8)
    assert any(note.startswith("7 of 8 clients (1, 2, 3, 4, 5, ...) have no test data") for note in single.notes)
    assert not partition(small(9, classes=2), "iid", clients=8, split=(1.0, 0.0, 0.0)).notes
    unused = partition(balanced(10, 10), "pat:1", clients=3)
    assert "70 of 100 samples belong to no client" in unused.notes


def test_min_size_is_enforced_or_refused():
    with pytest.raises(eh.EvenhandError, match="client 0 has 15 samples, fewer than min_size=20; use fewer"):
        partition(small(300), "iid", clients=20, min_size=20)
    assert partition(small(300), "dir:0.5", clients=10, min_size=8).sizes.min() >= 8
    with pytest.raises(
        eh.EvenhandError, match=r"the smallest client has .* 20 wanted, in .* lower min_size, raise ALPHA"
    ):
        partition(small(300), "dir:0.05", clients=14, min_size=20)
    tight = partition(small(60), "dir:0.01", clients=30)
    assert any("the best of" in note for note in tight.notes)
    with pytest.raises(eh.EvenhandError, match="need more than 300 samples"):
        partition(small(300), "sizes:lognormal", clients=40, min_size=10)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("pta:2", {}, r"unknown partition 'pta'; did you mean 'pat'\? \(evenhand partitions lists all 8\)"),
        ("pat", {}, "pat: needs a whole number of classes per client, such as pat:2"),
        ("pat:9", {}, "pat:9 asks for 9 classes per client, but small has 5"),
        ("dir:-1", {}, "dir:-1 needs the concentration ALPHA, a number above 0"),
        ("dir:x", {}, "needs the concentration ALPHA"),
        ("iid:3", {}, "iid takes nothing after the colon, not '3'"),
        ("sizes:normal", {}, "did you mean 'lognormal'"),
        ("bootstrap:0", {}, "needs the number of samples per client"),
        ("bootstrap:5", {"min_size": 9}, "bootstrap:5 gives every client fewer than min_size=9"),
        ("natural:town", {}, r"small has no column 'town' \(its columns: site, sex\)"),
        ("shares:lwo", {"by": "sex"}, "shares:lwo needs 'low', 'high' or a table .* did you mean 'low'"),
        ("shares", {"by": "sex"}, "needs 'low', 'high' or a table"),
        ("shares:50/50", {"by": "sex"}, "has 1 rows, but 'sex' has 2 groups"),
        ("shares:F=a/b,M=1/0", {"by": "sex"}, "'F=a/b' is not a row of shares"),
        ("shares:10/20,50/50", {"by": "sex"}, "sums to 30; a group's shares sum to 100"),
        ("shares:F=50/50", {"by": "sex"}, "says nothing of group 'M'"),
        ("shares:F=50/50,N=1/0", {"by": "sex"}, "has no group 'N'"),
        ("shares:50/50,20/30/50", {"by": "sex"}, "same number of clients"),
        ("shares:low", {"by": "sex", "clients": 3}, "is a table for 5 clients, not clients=3; leave clients out"),
        ("shares:50/50,1/0", {"by": "site"}, r"has 2 rows, but 'site' has 4 groups \(a, b, c, d\); name them"),
        ("shares:low", {"by": "sex+town"}, "no column 'town'"),
        ("shares:low", {}, "small has no sensitive attribute; name one"),
        ("iid", {"cap": 2}, r"iid has no option 'cap' \(its options: none\)"),
        ("dir:1,caps=2", {}, "dir has no option 'caps'; did you mean 'cap'"),
        ("iid", {"clients": 0}, "clients=0 must be a whole number, at least 1"),
        ("iid", {"seed": -1}, "seed=-1"),
        ("iid", {"split": (0.5, 0.2, 0.2)}, "must sum to 1"),
        ("iid", {"split": "half"}, "three shares"),
        ("iid", {"pool": "test"}, "pool='test' is not one of"),
    ],
)
def test_a_bad_partition_is_explained(spec, options, message):
    with pytest.raises(eh.EvenhandError, match=message):
        partition(people(), spec, **options)


def test_options_may_be_written_into_the_spec():
    data = people()
    written = partition(data, "dir:0.5,cap=none,min_size=3,clients=9")
    given_ = partition(data, "dir:0.5", cap=None, min_size=3, clients=9)
    assert written.fingerprint() == given_.fingerprint()
    assert written.spec == "dir:0.5,cap=none,min_size=3,clients=9"
    assert given_.spec == "dir:0.5,cap=None"


def test_a_partition_prints_as_a_table():
    data = small(200, class_names=("ant", "bee", "cat", "dog", "eel"))
    found = partition(data, "pat:2", clients=30)
    said = found.table(data, limit=3)
    assert said.startswith("pat:2: 30 clients of ")
    assert "train / validation / test 1" in said
    assert said.count("\n") == 5
    assert "... and 27 more clients" in said
    counts = found.label_counts(data)
    first = np.flatnonzero(counts[0])
    assert ", ".join(f"{data.class_names[c]}: {counts[0, c]}" for c in first) in said
    assert counts.sum() == 200
    grouped = people(200, sensitive=("sex", "site"))
    first = partition(grouped, "natural:site").table(grouped).splitlines()[1:3]
    assert first[0].split() == ["client", "train", "validation", "test", "labels", "sex", "site"]
    assert re.search(r"  F: \d+, M: \d+ +a: \d+$", first[1])
    assert "note: " in partition(small(4, classes=2), "iid", clients=6).table(small(4, classes=2))


def test_a_partition_draws_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    data = people()
    path = partition(data, "natural:site").draw(data, tmp_path / "picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(eh.EvenhandError, match=r"a picture is written as \.png, \.svg, \.pdf, not as 'picture'"):
        partition(data, "natural:site").draw(data, "picture")


def test_every_kind_is_listed_with_its_options():
    listed = {entry.name: entry for entry in partitions()}
    assert set(listed) == {"iid", "pat", "shards", "dir", "sizes", "natural", "shares", "bootstrap"}
    assert listed["dir"].options == {"per": "class", "cap": 1.0, "balance": True}
    said = repr(partitions())
    assert len(said.splitlines()) == 1 + len(listed)
    assert "shares:TABLE" in said
