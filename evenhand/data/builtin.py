"""Data sets that need no download: scikit-learn's digits and the synthetic federations of the fairness papers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from evenhand.checks import EvenhandError, flag, number
from evenhand.data.dataset import Dataset
from evenhand.data.files import read_bytes
from evenhand.data.optional import missing_hint
from evenhand.streams import stream

DIMENSION, CLASSES = 60, 10  # of the synthetic data

# FedFB's population: the share of class 1, and the mean and covariance of the two inputs in each class.
POSITIVE = 0.6
MEANS = np.array([[-2.0, -2.0], [2.0, 2.0]])
COVARIANCES = np.array([[[10.0, 1.0], [1.0, 3.0]], [[5.0, 1.0], [1.0, 5.0]]])
# Its clients: what each gets of group 0, of group 1, ...
HOLDERS = {2: "shares:20/40/40,50/30/20", 3: "shares:50/30/10/10,10/30/30/30,20/30/30/20"}


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


def synthetic_groups(
    *,
    samples: int = 5000,
    groups: int = 2,
    angle: float | str | Sequence[float] = 45.0,
    include_sensitive: bool = True,
    test: float = 0.3,
    seed: int = 0,
) -> Dataset:
    """FedFB's people in the plane: two classes, and a group z that goes with the class.

    y ~ Bernoulli(0.6); x ~ N((-2, -2), [[10, 1], [1, 3]]) for y = 0 and N((2, 2), [[5, 1], [1, 5]]) for y = 1. With x'
    = x turned by `angle` degrees, z = 1 with probability p(x' | y=1) / (p(x' | y=1) + p(x' | y=0)) (Zafar et al.,
    2017: the smaller the angle, the closer z goes with y). Several angles, `45,90`, give as many attributes, z1, z2.
    groups=3 is FedFB's other variant, without turning: with r the same ratio at x itself, z = 0, 1, 2 with probability
    0.7 r, 0.3, 0.7 (1 - r).

    3,500 samples are to train on and 1,500 to test on (`samples` in all, the share `test` of them). FedFB's three
    clients (for three groups: four) hold given shares of each group; it tests on all test samples at once, here each
    client gets the same shares of them. As in its code, z is an input unless include_sensitive=False.
    """
    number("samples", samples, low=10, whole=True)
    number("test", test, low=0.01, high=0.9)
    number("seed", seed, low=0, whole=True)
    number("groups", groups, low=2, high=3, whole=True)
    flag("include_sensitive", include_sensitive)
    angles = _angles(angle, groups)
    rng = stream(seed, "data", 2)
    targets = (rng.random(samples) < POSITIVE).astype(np.int64)
    spread = np.linalg.cholesky(COVARIANCES)[targets]
    x = MEANS[targets] + (spread @ rng.standard_normal((samples, 2, 1)))[..., 0]
    if groups == 3:
        ratio = _ratio(x)
        edges = np.cumsum([0.7 * ratio, np.full(samples, 0.3)], axis=0)
        people = {"z": (rng.random(samples) >= edges).sum(axis=0)}
    else:
        names = ["z"] if len(angles) == 1 else [f"z{place}" for place in range(1, len(angles) + 1)]
        people = {
            name: (rng.random(samples) < _ratio(x @ _turn(degrees).T)).astype(np.int64)
            for name, degrees in zip(names, angles, strict=True)
        }
    inputs = np.column_stack([x, *people.values()]) if include_sensitive else x
    return Dataset(
        name="synthetic-groups",
        inputs=torch.from_numpy(inputs.astype(np.float32)),
        targets=torch.from_numpy(targets),
        classes=2,
        class_names=("0", "1"),
        train_rows=max(1, round((1 - test) * samples)),
        columns=people,
        sensitive=tuple(people),
        source=f"generated: {samples:,} samples, seed {seed}",
        split="official",
        partition=HOLDERS[groups],
        feature_names=("x1", "x2", *(people if include_sensitive else ())),
    )


def _angles(given: float | str | Sequence[float], groups: int) -> list[float]:
    try:
        pieces = given.split(",") if isinstance(given, str) else [given] if isinstance(given, (int, float)) else given
        angles = [float(piece) for piece in pieces]
    except (TypeError, ValueError):
        angles = []
    if not angles or not np.isfinite(angles).all():
        raise EvenhandError(f"angle={given!r} must be degrees, one number for each attribute, such as 45 or 45,90")
    if groups == 3 and angles != [45.0]:
        raise EvenhandError("groups=3 turns nothing: leave angle out, or groups")
    return angles


def _turn(degrees: float) -> np.ndarray:
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def _ratio(x: np.ndarray) -> np.ndarray:
    """p(x | y=1) / (p(x | y=1) + p(x | y=0)): the chance of class 1 were both classes equally common."""
    away = x[:, None, :] - MEANS
    distances = np.einsum("nci,cij,ncj->nc", away, np.linalg.inv(COVARIANCES), away)
    logs = -0.5 * (distances + np.log(np.linalg.det(COVARIANCES)))
    return 1 / (1 + np.exp(np.clip(logs[:, 0] - logs[:, 1], -700, 700)))
