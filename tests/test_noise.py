"""Wrong labels in some clients' training data: how many, whose; a run trains on them and is tested on the truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from evenhand.checks import EvenhandError
from evenhand.data import Dataset, Noise, load, partition
from evenhand.engine.checkpoint import restore, save
from evenhand.experiment import Experiment, prepare
from evenhand.running import load_runs, simulate

DIGITS = load("digits")
SMALL = {"data": "digits", "clients": 6, "rounds": 4, "eval_every": 4, "sampling.participation": 0.5}


def wrong_share(drawn, data, client):
    """The share of a client's training labels that is not the truth."""
    start, end = drawn.train.offsets[client : client + 2]
    return np.mean(drawn.labels[start:end] != data.labels[drawn.train.indices[start:end]])


def test_the_noise_is_what_the_description_says():
    rng = np.random.default_rng(0)
    data = Dataset("many", torch.zeros(60_000, 1), torch.from_numpy(rng.integers(0, 5, 60_000)), 5)
    drawn = Noise(0.6, 0.5).apply(partition(data, "iid", clients=300), data, seed=3)
    noisy = drawn.noise > 0
    assert abs(noisy.mean() - 0.6) < 4 * np.sqrt(0.24 / 300)
    assert drawn.noise[noisy].min() >= 0.5
    assert abs(drawn.noise[noisy].mean() - 0.75) < 4 * np.sqrt(0.25 / 12 / noisy.sum())
    found = np.array([wrong_share(drawn, data, client) for client in range(300)])
    assert (found[~noisy] == 0).all()
    # a label drawn anew is the true one once in five times
    np.testing.assert_allclose(found[noisy].mean(), 0.8 * drawn.noise[noisy].mean(), rtol=0.02)
    anew = drawn.labels[drawn.labels != data.labels[drawn.train.indices]]
    np.testing.assert_allclose(np.bincount(anew, minlength=5) / len(anew), 0.2, atol=0.02)


def test_levels_are_exact_and_nothing_is_noisy_without_rho():
    every = Noise(1.0, 1.0).apply(partition(DIGITS, "iid", clients=3), DIGITS)
    assert every.noise.tolist() == [1.0] * 3
    none = Noise(0.0, 0.5).apply(partition(DIGITS, "iid", clients=3), DIGITS)
    np.testing.assert_array_equal(none.labels, DIGITS.labels[none.train.indices])
    assert none.notes == ("0 of 3 clients have noisy labels",)


def test_clients_who_share_a_sample_need_not_agree_on_its_label():
    drawn = Noise(0.5, 0.9).apply(partition(DIGITS, "bootstrap:400", clients=6), DIGITS, seed=1)
    clean, noisy = drawn.noise == 0, drawn.noise > 0
    assert clean.any()
    assert noisy.any()
    assert all(wrong_share(drawn, DIGITS, client) == 0 for client in np.flatnonzero(clean))
    assert all(wrong_share(drawn, DIGITS, client) > 0.7 for client in np.flatnonzero(noisy))


def test_the_same_seed_gives_the_same_noise_and_the_fingerprint_knows_it():
    clean = partition(DIGITS, "pat:2", clients=10, seed=2)
    one, two, other = (Noise(0.6, 0.5).apply(clean, DIGITS, seed=seed) for seed in (2, 2, 3))
    np.testing.assert_array_equal(one.labels, two.labels)
    assert one.fingerprint() == two.fingerprint()
    assert len({clean.fingerprint(), one.fingerprint(), other.fingerprint()}) == 3
    assert (one.noise != other.noise).any()


def test_the_partition_says_who_is_noisy():
    drawn = Noise(0.6, 0.5).apply(partition(DIGITS, "pat:2", clients=5), DIGITS)
    assert drawn.describe().endswith(f"{(drawn.noise > 0).sum()} clients with noisy labels")
    table = drawn.table(DIGITS).splitlines()
    assert table[1].split()[4] == "noise"
    for client, line in enumerate(table[2:7]):
        level = drawn.noise[client]
        assert line.split()[4] == (f"{level:.2f}" if level else "-")
    assert "clients have noisy labels (levels" in table[-1]


@pytest.mark.parametrize("wrong", ["", "a lot", "0.5,0.2,0.1", "1.2,0", "0.5,-1", "0.5,nan"])
def test_noise_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(EvenhandError, match="noise"):
        Experiment(noise=wrong)


def test_an_experiment_remembers_its_noise():
    chosen = Experiment().with_settings({"noise": [0.6, 0.5]})
    assert chosen.noise == "0.6,0.5"
    assert chosen == Experiment.from_dict(chosen.to_dict())
    assert "label noise 0.6,0.5" in str(chosen)


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("name", ["fedavg", "cenfair", "fpfl"])
def test_a_run_trains_on_the_wrong_labels_and_is_tested_on_the_truth(name):
    """The same numbers as on data whose labels are wrong where the clients' are, but the test's."""
    wanted = {"data": "synthetic-groups", "clients": 4, "partition": "iid", "rounds": 3, "eval_every": 3}
    chosen = Experiment().with_settings({"method": name, "noise": "0.7,0.4", **wanted})
    simulation = prepare(chosen)
    drawn = simulation.replicas[0].partition
    assert (drawn.noise > 0).any()
    targets = simulation.dataset.targets.clone()
    targets[torch.from_numpy(drawn.train.indices)] = torch.from_numpy(drawn.labels)
    other = prepare(replace(chosen, noise=None), dataset=replace(simulation.dataset, targets=targets))
    other.replicas[0].partition = replace(drawn, labels=None, noise=None)  # its own was stratified by other labels
    for one in (simulation, other):
        one.run()
    mine, theirs = simulation.replicas[0], other.replicas[0]
    torch.testing.assert_close(mine.model, theirs.model, rtol=0, atol=1e-6)
    assert mine.rounds[-1]["losses"] == pytest.approx(theirs.rounds[-1]["losses"], abs=1e-6)
    np.testing.assert_allclose(mine.evaluations[-1]["losses"], theirs.evaluations[-1]["losses"], atol=1e-6)


@pytest.mark.parametrize("program", ["feed-forward", "batched", "sequential"])
def test_seeds_have_labels_of_their_own_whichever_way_they_run(program):
    wanted = {**SMALL, "method": "fedavg", "noise": "0.7,0.5", "program": program, "rounds": 2}
    together = prepare(Experiment().with_settings({**wanted, "seeds": [0, 4]}))
    together.together = True  # as one program, as on a GPU
    together.run()
    for replica in together.replicas:
        alone = prepare(Experiment().with_settings({**wanted, "seeds": [replica.seed]}))
        alone.run()
        torch.testing.assert_close(replica.model, alone.replicas[0].model, rtol=0, atol=1e-5)


def test_a_noisy_run_goes_on_to_the_same_bits_and_leaves_a_record(tmp_path):
    chosen = Experiment().with_settings({**SMALL, "method": "fedfv", "noise": "0.7,0.5"})
    whole, half, rest = (prepare(chosen) for _ in range(3))
    whole.run()
    half.run(until=2)
    save(half, tmp_path / "half")
    restore(rest, tmp_path / "half")
    rest.run()
    assert torch.equal(whole.replicas[0].model, rest.replicas[0].model)
    with pytest.raises(EvenhandError, match="another seed, method or partition"):
        restore(prepare(replace(chosen, noise="0.7,0.4")), tmp_path / "half")
    runs = simulate(chosen, out=tmp_path / "run")
    levels = runs[0].partition.noise
    lines = (tmp_path / "run" / "noise.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == [str(client) for client in np.flatnonzero(levels > 0)]
    np.testing.assert_allclose([float(line.split(",")[2]) for line in lines[1:]], levels[levels > 0], atol=1e-6)
    assert any("noisy labels" in note for note in runs.notes)
    assert load_runs(tmp_path / "run").experiment.noise == "0.7,0.5"
    simulate(replace(chosen, noise=None), out=tmp_path / "run", force=True)
    assert not (tmp_path / "run" / "noise.csv").exists()
