"""What is carried from round to round: on disk and back without a trace, and the memory of absent clients."""

from __future__ import annotations

import json
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import evenhand as eh
from evenhand.state import SLACK, kept_window, window_of

NAMES = [entry.name for entry in eh.methods()]
WITH_MEMORY = [
    "even",
    "even:recall=learnt",
    "fedlf",
    "fedfv:tau=2",
    "fedmdfg",
    "adafed:absent=last:3",
    "mfairfl:absent=expected",
]
COHORTS = [(0, 3, 5, 7, 9), (1, 3, 4), (2, 5, 6, 8, 10, 11), (0, 1), (3, 4, 9, 11), (7, 2, 5)]  # of 12 clients


def called(naming, number):
    return f"client {number}" if naming is str else number


def matrix(rows, rng, columns=40):
    return rng.standard_normal((rows, columns)) + 0.3


def long_matrix(rows, rng):
    return torch.tensor(matrix(rows, rng, 3_000), dtype=torch.float32)


def narrow_matrix(rows, rng):
    return torch.tensor(matrix(rows, rng, 3_000), dtype=torch.bfloat16)


def state_dicts(rows, rng):
    return [
        {
            "body.weight": torch.tensor(matrix(6, rng, 5), dtype=torch.float32),
            "body.bias": torch.tensor(rng.standard_normal(6), dtype=torch.float32),
            "head.weight": torch.tensor(matrix(2, rng, 6), dtype=torch.float32),
            "steps": torch.tensor(3),
        }
        for _ in range(rows)
    ]


def stacked(rows, rng):
    return {"body.weight": matrix(rows * 3, rng, 4).reshape(rows, 3, 4), "head.weight": matrix(rows, rng, 7)}


def lists(rows, rng):
    return [[row[:30].reshape(5, 6), row[30:]] for row in matrix(rows, rng)]


FORMS = [matrix, long_matrix, narrow_matrix, state_dicts, stacked, lists]


def rounds(form=matrix, naming=str, cohorts=COHORTS):
    """The rounds' clients, updates and numbers, the same ones every time."""
    rng = np.random.default_rng(7)
    for cohort in cohorts:
        count = len(cohort)
        yield {
            "updates": form(count, rng),
            "clients": [called(naming, number) for number in cohort],
            "losses": rng.uniform(0.2, 3.0, count),
            "sizes": rng.integers(10, 500, count).astype(float),
            "accuracies": rng.uniform(0.1, 0.9, count),
            "fairness": rng.uniform(-0.2, 0.2, count),
            "fairness_global": 0.05,
            "lr": 0.1,
        }


def flat(update):
    """One client's update (or a round's outcome) as a long float64 vector."""
    entries = update.values() if isinstance(update, dict) else update if isinstance(update, list) else [update]
    tensors = [torch.as_tensor(entry) for entry in entries]
    return np.concatenate([t.double().flatten().numpy() for t in tensors if t.is_floating_point()])


def clients_of(updates, count):
    """Each client's update on its own."""
    if isinstance(updates, dict):
        return [{name: rows[k] for name, rows in updates.items()} for k in range(count)]
    return [updates[k] for k in range(count)]


def same(one, other):
    assert type(one) is type(other)
    np.testing.assert_array_equal(flat(one), flat(other))


# ------------------------------------------------------------------------------------------------ disk and back


@pytest.mark.parametrize("naming", [str, int])
@pytest.mark.parametrize("name", NAMES)
def test_saving_and_loading_changes_nothing(name, naming, tmp_path):
    """Six rounds with the state in memory, and the same with the state on disk in between: equal to the last bit."""
    held = stored = None
    for given in rounds(naming=naming):
        out = eh.aggregate(name, state=held, **given)
        again = eh.aggregate(name, state=stored, **given)
        same(again.update, out.update)
        np.testing.assert_array_equal(again.coefficients, out.coefficients)
        assert again.diagnostics.clients == out.diagnostics.clients
        if out.evaluation_offset is not None:
            same(again.evaluation_offset, out.evaluation_offset)
        held = out.state
        out.state.save(tmp_path / "a")
        again.state.save(tmp_path / "state")
        stored = eh.State.load(tmp_path / "state")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "state").read_bytes()
        assert (stored.round, stored.seen, repr(stored)) == (held.round, held.seen, repr(held))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_MEMORY)
def test_remembered_updates_of_every_form_survive_the_disk(name, form, own, tmp_path):
    held = stored = None
    for given in rounds(form):
        out = eh.aggregate(name, state=held, own=own, **given)
        again = eh.aggregate(name, state=stored, own=own, **given)
        same(again.update, out.update)
        held = out.state
        again.state.save(tmp_path / "state")
        stored = eh.State.load(str(tmp_path / "state"))


@pytest.mark.parametrize("server", ["momentum", "fedadam", "fedamsgrad", "fedyogi", "average", "fedfa"])
def test_server_steps_survive_the_disk(server, tmp_path):
    held = stored = None
    for given in rounds(state_dicts):
        out = eh.aggregate("even", state=held, server=server, **given)
        again = eh.aggregate("even", state=stored, server=server, **given)
        same(again.update, out.update)
        held = out.state
        again.state.save(tmp_path / "state")
        stored = eh.State.load(tmp_path / "state")


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_not_used_up(name):
    """The same round from the same state twice, and after the state has gone on: always the same outcome."""
    first, second, third = list(rounds())[:3]
    start = eh.aggregate(name, **first).state
    once = eh.aggregate(name, state=start, **second)
    later = eh.aggregate(name, state=once.state, **third)
    same(eh.aggregate(name, state=start, **second).update, once.update)
    same(eh.aggregate(name, state=once.state, **third).update, later.update)


def test_what_the_caller_does_to_an_outcome_does_not_reach_the_state():
    """AFL's averaged model is kept in the state; the caller gets a copy of it."""
    first, second, third = list(rounds())[:3]

    def run(spoil):
        out = eh.aggregate("afl", **first)
        out = eh.aggregate("afl", state=out.state, **second)
        if spoil:
            out.update.fill(np.nan)
            out.evaluation_offset.fill(np.nan)
            out.coefficients.fill(np.nan)
        return eh.aggregate("afl", state=out.state, **third)

    same(run(spoil=True).update, run(spoil=False).update)
    same(run(spoil=True).evaluation_offset, run(spoil=False).evaluation_offset)


def some_state(name="even", form=matrix):
    state = None
    for given in list(rounds(form))[:3]:
        state = eh.aggregate(name, state=state, **given).state
    return state


def forbidden(*args, **kwargs):
    raise AssertionError("pickle was used")


@pytest.mark.parametrize("name", ["even", "afl", "fedadam", "fedmdfg", "mfairfl"])
def test_no_pickle_is_written_or_read(name, tmp_path, monkeypatch):
    """The file is a safetensors file: a length, a JSON header, then bare numbers."""
    state = some_state(name)
    for function in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, function, forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    state.save(tmp_path / "state")
    assert eh.State.load(tmp_path / "state").seen == state.seen
    content = (tmp_path / "state").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"evenhand": "state/1"}
    start, stop = header["json"]["data_offsets"]
    assert json.loads(content[8 + length + start : 8 + length + stop])["rule"] == state.rule
    extents = [entry["data_offsets"] for entry in header.values()]
    assert max(stop for _, stop in extents) == len(content) - 8 - length  # nothing besides the tensors


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_name(share, tmp_path):
    path = tmp_path / "half a state"
    some_state().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(eh.EvenhandError, match=r"half a state.* is not a readable state file"):
        eh.State.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"nothing but text\n" * 20,
        b'{"rule": "even"}',
        pickle.dumps({"rule": "even"}),
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 1 << 60) + b"{}",
    ],
    ids=["empty", "one byte", "text", "json", "pickle", "no tensors", "absurd header"],
)
def test_a_file_of_another_kind_is_refused_by_name(content, tmp_path):
    path = tmp_path / "something else"
    path.write_bytes(content)
    with pytest.raises(eh.EvenhandError, match="something else"):
        eh.State.load(path)


def test_a_foreign_safetensors_file_is_refused_by_name(tmp_path):
    path = tmp_path / "weights"
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(
        eh.EvenhandError, match=r"weights' is a safetensors file, but not a state file that evenhand wrote"
    ):
        eh.State.load(path)
    save_file({"weight": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(eh.EvenhandError, match="not a state file that evenhand wrote"):
        eh.State.load(path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", "{}", '{"memory": {}}', '{"memory": {"$": "tensor", "name": "nowhere"}}', "\udcff"],
)
def test_a_damaged_description_is_refused_by_name(text, tmp_path):
    path = tmp_path / "damaged"
    raw = torch.frombuffer(bytearray(text.encode(errors="surrogateescape")), dtype=torch.uint8)
    save_file({"json": raw}, path, metadata={"evenhand": "state/1"})
    with pytest.raises(eh.EvenhandError, match="damaged' is not a readable state file"):
        eh.State.load(path)


def test_a_file_without_its_description_is_refused_by_name(tmp_path):
    path = tmp_path / "damaged"
    save_file({"weight": torch.ones(3)}, path, metadata={"evenhand": "state/1"})
    with pytest.raises(eh.EvenhandError, match="damaged' is not a readable state file"):
        eh.State.load(path)


def test_a_format_of_the_future_is_refused_by_name(tmp_path):
    path = tmp_path / "future"
    save_file({"weight": torch.ones(3)}, path, metadata={"evenhand": "state/99"})
    with pytest.raises(eh.EvenhandError, match="future' has state format 99; this version reads"):
        eh.State.load(path)


@pytest.mark.parametrize("path", ["nowhere", "no folder/state", "."])
def test_a_missing_file_is_named(path, tmp_path):
    with pytest.raises(eh.EvenhandError, match="no state file at"):
        eh.State.load(tmp_path / path)


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("failure", [full_disk, interrupted])
@pytest.mark.parametrize("step", ["replace", "fsync", "fdopen"])
def test_a_failed_save_leaves_the_old_file_alone(step, failure, tmp_path, monkeypatch):
    path = tmp_path / "state"
    some_state("afl").save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, step, failure)
    with pytest.raises((OSError, KeyboardInterrupt)):
        some_state("even").save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    some_state("even").save(path)  # and the next one works
    assert eh.State.load(path).rule == "even"


def test_a_save_replaces_what_was_there(tmp_path):
    path = tmp_path / "state"
    path.write_text("an older file, much longer than a state could be " * 10_000)
    state = some_state("afl")
    state.save(str(path))
    assert repr(eh.State.load(path)) == repr(state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_state_is_saved_beside_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    some_state().save("state")
    assert eh.State.load("state").round == 2


def test_a_rule_may_carry_nothing_that_is_not_plain(tmp_path):
    state = eh.State("mine", "plain", 0, True, frozenset(), [], rule_memo={"secret": object()})
    with pytest.raises(eh.EvenhandError, match="what is saved may hold arrays, tensors, numbers and text, not object"):
        state.save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_only_the_rows_in_use_are_written(tmp_path):
    """The updates may be a small part of a large tensor, and the memory has room to spare."""
    large = torch.randn(1_000, 500)
    out = eh.aggregate("even", large[:4], losses=np.ones(4), clients=list("abcd"), own=True)
    out.state.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 4 * 500 * 4 + 10_000


def test_rows_that_share_memory_can_be_saved(tmp_path):
    """Clients that sent one and the same tensor, given up by the caller, in two rounds."""
    row = torch.randn(50)
    held = stored = None
    for index in range(3):
        clients = [f"{index} {who}" for who in "ab"]
        held = eh.aggregate("fedlf", [row, row], losses=[1.0, 2.0], clients=clients, own=True, state=held).state
        stored = eh.aggregate("fedlf", [row, row], losses=[1.0, 2.0], clients=clients, own=True, state=stored).state
        stored.save(tmp_path / "state")
        stored = eh.State.load(tmp_path / "state")
    out = eh.aggregate("fedlf", [row], losses=[1.0], clients=["new"], state=held)
    again = eh.aggregate("fedlf", [row], losses=[1.0], clients=["new"], state=stored)
    same(again.update, out.update)


# ----------------------------------------------------------------------------------------------------- the memory


class Recollection:
    """The memory as a person would keep it: everyone's latest update, forgotten when no window can reach it."""

    def __init__(self, absent):
        self.absent, self.seen, self.latest = absent, set(), {}

    def round(self, index, given):
        """The rows that the round should use: present ones, then absent ones within the window; as vectors."""
        count = len(given["clients"])
        now = dict(zip(given["clients"], map(flat, clients_of(given["updates"], count)), strict=True))
        self.seen |= set(now)
        window = window_of(self.absent, len(self.seen), count)
        used = {
            client: (index - sent, row)
            for client, (sent, row) in self.latest.items()
            if client not in now and index - sent <= window
        }
        oldest = kept_window(self.absent, window)
        self.latest = {c: e for c, e in self.latest.items() if c not in now and index - e[0] <= oldest}
        if self.absent != "off":
            self.latest |= {client: (index, row) for client, row in now.items()}
        return {client: (0, row) for client, row in now.items()} | used


def assert_recalled(said, wanted, tolerance):
    """The round's rows are the right clients' with the right ages, and their inner products are fresh ones."""
    assert set(said.clients) == set(wanted)
    assert len(said.clients) == len(wanted)
    assert said.ages.tolist() == [wanted[client][0] for client in said.clients]
    rows = np.array([wanted[client][1] for client in said.clients])
    lengths = np.linalg.norm(rows, axis=1)
    errors = np.abs(said.gram.sum(axis=0) - rows @ rows.T) / np.outer(lengths, lengths)
    assert errors.max() <= tolerance


MANY = [*COHORTS, (0,), (1, 2), tuple(range(12)), tuple(range(10)), (4, 5, 6), (11,), (3,), (0, 1, 2, 3, 4, 5), (6,)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("absent", ["off", "last:1", "last:3", "expected"])
@pytest.mark.parametrize("stored", [False, True], ids=["held", "stored"])
def test_the_memory_is_what_a_person_would_remember(form, absent, stored, tmp_path):
    recollection, state = Recollection(absent), None
    tolerance = 1e-13 if form in (matrix, stacked, lists) else 2e-6
    for index, given in enumerate(rounds(form, cohorts=MANY)):
        out = eh.aggregate("even", absent=absent, state=state, **given)
        assert_recalled(out.diagnostics, recollection.round(index, given), tolerance)
        state = out.state
        assert set(state.memory.clients) == set(recollection.latest)
        if stored:
            state.save(tmp_path / "state")
            state = eh.State.load(tmp_path / "state")


def test_rounds_may_be_skipped():
    """Ages count rounds, not calls."""
    recollection, state = Recollection("last:3"), None
    for index, given in zip([0, 2, 3, 7, 8, 10], rounds(), strict=True):
        out = eh.aggregate("even", absent="last:3", state=state, round=index, **given)
        assert_recalled(out.diagnostics, recollection.round(index, given), 1e-13)
        state = out.state
    assert out.diagnostics.ages.max() == 3


def test_a_smaller_cohort_widens_the_window_again():
    """Rows out of the window in one round come back into it in a later one."""
    some, more, rest = tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12))
    cohorts = [some, more, rest, some + more, some + more, (0,)]
    recollection, state = Recollection("expected"), None
    for index, given in enumerate(rounds(cohorts=cohorts)):
        out = eh.aggregate("even", state=state, **given)
        assert_recalled(out.diagnostics, recollection.round(index, given), 1e-13)
        state = out.state
        if index == 4:
            assert len(out.diagnostics.clients) == 8  # the last four were out of the window
    assert len(out.diagnostics.clients) == 12
    assert sorted(out.diagnostics.ages.tolist()) == [0] + 7 * [1] + 4 * [3]
    assert np.isfinite(out.update).all()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("absent", "reach"), [("last:3", 3), ("expected", SLACK * 40)])
def test_old_updates_are_let_go(absent, reach, own):
    """Neither the rows nor their tensors pile up."""
    state = None
    for index in range(40):
        given = np.random.default_rng(index).standard_normal((2, 100))
        clients = [2 * index, 2 * index + 1]  # nobody comes twice
        out = eh.aggregate("even", given, losses=[1.0, 2.0], clients=clients, absent=absent, state=state, own=own)
        state, rows = out.state, 2 * (min(index, reach) + 1)
        assert len(state.memory.clients) == rows
        held = sum(torch.as_tensor(t).numel() for t in tensors_in(state.memory.held))
        assert held <= (1.5 if own else 1.0) * 100 * rows + 100
    assert f"{len(state.memory.clients)} updates remembered" in repr(state)


def tensors_in(value):
    """Every tensor and array in a nest of dataclasses and containers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for entry in value for found in tensors_in(entry)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", ["fedavg", "adafed", "fedlf:absent=off", "fedfv:tau=0", "even:absent=off"])
def test_a_method_without_memory_keeps_no_updates(name):
    state = some_state(name)
    assert "0 updates remembered" in repr(state)
    assert sum(torch.as_tensor(t).numel() for t in tensors_in(state.memory)) == 0


def test_nobody_is_remembered_without_a_name():
    out = eh.aggregate("even", matrix(3, np.random.default_rng(0)), losses=[1.0, 2.0, 3.0])
    assert "0 updates remembered" in repr(out.state)


@pytest.mark.parametrize("form", FORMS)
def test_updates_may_be_overwritten_after_the_call(form):
    """own=False, the default: the memory has copies."""

    def run(spoil):
        state = None
        for given in rounds(form):
            out = eh.aggregate("fedlf", state=state, **given)
            state = out.state
            if spoil:
                for tensor in tensors_in(given["updates"]):
                    torch.as_tensor(tensor).fill_(99)
        return out.update

    same(run(spoil=True), run(spoil=False))


@pytest.mark.parametrize("form", FORMS)
def test_a_state_given_up_serves_no_second_call(form):
    """own=True: the memory is written in place, and whoever comes with the old state is told."""
    first, second, third = list(rounds(form, cohorts=[(0, 1, 2), (2, 3), (0, 4)]))
    old = eh.aggregate("even", absent="last:2", **first).state
    new = eh.aggregate("even", absent="last:2", own=True, state=old, **second).state
    with pytest.raises(eh.EvenhandError, match="this state was given up"):
        eh.aggregate("even", absent="last:2", state=old, **second)
    once, twice = (eh.aggregate("even", absent="last:2", state=new, **third).update for _ in range(2))
    same(once, twice)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own", [(False, True, True), (True, False, True), (False, False, True), (True, True, False)])
def test_states_may_be_given_up_and_not_by_turns(form, own):
    """Whichever way each round keeps its rows, the outcome is the same."""
    held = mixed = None
    for index, given in enumerate(rounds(form, cohorts=MANY)):
        out = eh.aggregate("fedlf", state=held, **given)
        again = eh.aggregate("fedlf", state=mixed, own=own[index % 3], **given)
        np.testing.assert_allclose(flat(again.update), flat(out.update), rtol=1e-4, atol=1e-5)
        assert again.diagnostics.clients == out.diagnostics.clients
        held, mixed = out.state, again.state


def test_giving_states_up_changes_no_outcome():
    for form in FORMS:
        held = given_up = None
        for given in rounds(form):
            out = eh.aggregate("fedlf", state=held, **given)
            again = eh.aggregate("fedlf", state=given_up, own=True, **given)
            np.testing.assert_allclose(flat(again.update), flat(out.update), rtol=1e-5, atol=1e-6)
            held, given_up = out.state, again.state


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_client_leaves_no_trace_in_the_memory(form, own):
    """It is remembered with its last good update, and its NaN spoils no later round."""
    first, second, third = list(rounds(form, cohorts=[(0, 1, 2, 3), (0, 1, 2), (4, 5)]))
    out = eh.aggregate("even", absent="last:3", own=own, **first)
    torch.as_tensor(tensors_in(clients_of(second["updates"], 3)[1])[0]).view(-1)[0] = np.nan
    out = eh.aggregate("even", absent="last:3", own=own, state=out.state, **second)
    assert list(out.diagnostics.excluded) == ["client 1"]
    out = eh.aggregate("even", absent="last:3", own=own, state=out.state, **third)
    ages = dict(zip(out.diagnostics.clients, out.diagnostics.ages.tolist(), strict=True))
    assert ages == {"client 4": 0, "client 5": 0, "client 0": 1, "client 2": 1, "client 1": 2, "client 3": 2}
    assert np.isfinite(flat(out.update)).all()
    assert np.isfinite(out.diagnostics.gram).all()


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_remembered_updates_of_any_scale_count(scale):
    """The direction is the same in any unit, absent clients included."""

    def run(unit):
        state = None
        for given in rounds(long_matrix):
            given["updates"] = given["updates"] * unit
            out = eh.aggregate("even", state=state, **given)
            state = out.state
        assert (out.diagnostics.ages > 0).any()
        return flat(out.update) / unit

    plain = run(1.0)
    assert np.linalg.norm(run(scale) - plain) <= 1e-4 * np.linalg.norm(plain)


def test_losses_of_absent_clients_are_remembered_too():
    """even on two rounds is even on all rows at once with everyone's last losses."""
    first, second = list(rounds(cohorts=[(0, 1, 2), (3, 4)]))
    out = eh.aggregate("even", level=False, **first)
    out = eh.aggregate("even", level=False, state=out.state, **second)
    together = np.concatenate([second["updates"], first["updates"]])
    losses = np.concatenate([second["losses"], first["losses"]])
    at_once = eh.aggregate("even", together, losses=losses, level=False)
    cosine = out.update @ at_once.update / (np.linalg.norm(out.update) * np.linalg.norm(at_once.update))
    assert cosine == pytest.approx(1.0, abs=1e-12)
    assert np.linalg.norm(out.update) == pytest.approx(np.linalg.norm(second["updates"].mean(axis=0)))


def test_coefficients_cover_present_clients_first():
    first, second = list(rounds(cohorts=[(0, 1, 2), (3, 1)]))
    out = eh.aggregate("even", **first)
    out = eh.aggregate("even", state=out.state, **second)
    assert out.diagnostics.clients == ("client 3", "client 1", "client 0", "client 2")
    assert out.coefficients.shape == (1, 4)
    rows = np.concatenate([second["updates"], first["updates"][[0, 2]]])
    np.testing.assert_allclose(out.coefficients[0] @ rows, out.update, atol=1e-12)
