"""Data sets that need no download: scikit-learn's digits and the synthetic federations of the fairness papers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from evenhand.checks import EvenhandError, flag, number
from evenhand.data.dataset import Dataset
from evenhand.data.files import read_bytes
from evenhand.data.optional import missing_hint
from evenhand.streams import stream

DIMENSION, CLASSES = 60, 10  # of the synthetic data


def digits() -> Dataset:
    """Small handwritten digits (UCI, as scikit-learn ships them), pixels in [0, 1]."""
    table = np.loadtxt(read_bytes(_digits_file()).decode("ascii").splitlines(), delimiter=",", dtype=np.float32)
    if table.shape != (1797, 65):
        raise EvenhandError(f"{_digits_file()} holds a {table.shape} table, expected (1797, 65)")
    return Dataset(
        name="digits",
        inputs=torch.from_numpy(table[:, :64] / 16.0).reshape(-1, 1, 8, 8),
        targets=torch.from_numpy(table[:, 64].astype(np.int64)),
        classes=10,
        class_names=tuple("0123456789"),
        source="scikit-learn's load_digits (UCI optical recognition of handwritten digits, test part)",
    )


def _digits_file() -> Path:
    # Found, not imported: importing scikit-learn takes longer than reading the file.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise EvenhandError(missing_hint("sklearn", "the digits data set"))
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise EvenhandError(f"this scikit-learn has no {path}; install another version (pip install -U scikit-learn)")
    return path


def synthetic(
    alpha: float,
    beta: float,
    *,
    clients: int = 30,
    mean: float = 4.0,
    sigma: float = 2.0,
    base: int = 50,
    hybrid: bool = False,
    seed: int = 0,
) -> Dataset:
    """FedProx's and q-FFL's Synthetic(alpha, beta): each client has its own linear rule and inputs.

    Client k: u_k ~ N(0, alpha) and B_k ~ N(0, beta), where alpha and beta are STANDARD DEVIATIONS as in the published
    code; W_k and b_k ~ N(u_k, 1), v_k ~ N(B_k, 1) in 60 dimensions, x ~ N(v_k, diag(j^-1.2)), y = argmax(W_k' x +
    b_k). (So alpha moves all ten scores alike and never changes a label.) Sizes are int(lognormal(mean, sigma)) +
    base. `hybrid` is q-FFL's mixture: the first half of the clients share one rule and centred inputs (published with
    alpha = beta = 1, clients=100, sigma=1).
    """
    number("alpha", alpha, low=0)
    number("beta", beta, low=0)
    flag("hybrid", hybrid)
    shared = clients // 2 if hybrid else 0
    name = f"synthetic:{alpha:g},{beta:g}" + (" hybrid" if hybrid else "")
    return _federation(name, alpha, beta, shared, clients, mean, sigma, base, seed)


def synthetic_iid(
    *, clients: int = 30, mean: float = 4.0, sigma: float = 2.0, base: int = 50, seed: int = 0
) -> Dataset:
    """The same with one linear rule, W and b ~ N(0, 1), and centred inputs for all clients."""
    return _federation("synthetic-iid", 0.0, 0.0, clients, clients, mean, sigma, base, seed)


def _federation(
    name: str, alpha: float, beta: float, shared: int, clients: int, mean: float, sigma: float, base: int, seed: int
) -> Dataset:
    """Clients [0, shared) follow one common rule, the others each their own."""
    number("clients", clients, low=1, whole=True)
    number("sigma", sigma, low=0)
    number("base", base, low=1, whole=True)
    number("mean", mean)
    number("seed", seed, low=0, whole=True)
    rng = stream(seed, "data", 0)
    sizes = rng.lognormal(mean, sigma, clients).astype(np.int64) + base
    rule_means = rng.normal(0.0, alpha, clients)
    input_means = rng.normal(0.0, beta, clients)
    common = rng.standard_normal((DIMENSION + 1, CLASSES))
    deviations = np.arange(1, DIMENSION + 1) ** -0.6  # square roots of the variances j^-1.2

    owner = np.repeat(np.arange(clients), sizes)
    inputs = np.empty((len(owner), DIMENSION), np.float32)
    targets = np.empty(len(owner), np.int64)
    ends = np.cumsum(sizes)
    for client, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rule, centre = common, np.zeros(DIMENSION)
        if client >= shared:
            rule = rng.normal(rule_means[client], 1.0, (DIMENSION + 1, CLASSES))  # last row: the bias
            centre = rng.normal(input_means[client], 1.0, DIMENSION)
        drawn = centre + deviations * rng.standard_normal((end - start, DIMENSION))
        inputs[start:end] = drawn
        targets[start:end] = (drawn @ rule[:-1] + rule[-1]).argmax(axis=1)
    return Dataset(
        name=name,
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        classes=CLASSES,
        columns={"client": owner},
        source=f"generated: {clients} clients, sizes int(lognormal({mean:g}, {sigma:g})) + {base}, seed {seed}",
    )
