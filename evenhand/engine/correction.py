"""FedCorr in the simulator: when each of its stages is due, who is found noisy, and which labels are corrected.

Paper: Xu et al., FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022, Algorithm 1.
  Stage 1, `iterations` times: every client once, `together` of them a round. A client trains with the pull
  beta * level * |w - w_t| towards the received model, then says how large the local intrinsic dimension (LID) of its
  own model's softmax outputs is. After each iteration a mixture of two Gaussians over the clients' accumulated LIDs
  tells noisy clients from clean ones; over the losses of a noisy client's samples, which share of its labels is
  wrong (its level). Of its samples with the largest losses, `ratio` times that share, those of which the new shared
  model is sure beyond `confidence` get that model's label.
  Stage 2: rounds with the clients whose level is at most `clean`; then noisy clients take the shared model's label
  wherever it is sure beyond `confidence`.
  Stage 3: all clients, as without FedCorr, with the method's own rule and server step. Before that it is FedAvg.

In all stages clients train with mixup.

Departures: the losses are cross-entropies (the released code takes a softmax twice). The pull is there at every step at
which the model has moved (the code leaves out every epoch's first batch). LIDs are averaged over the iterations in
which a client answered; one that never did counts as clean.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from evenhand.checks import EvenhandError
from evenhand.data import Split
from evenhand.engine.programs import answering
from evenhand.engine.sampling import Sampling
from evenhand.objectives import Correction
from evenhand.streams import stream

Floats = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Memo = Mapping[str, Any]

EPSILON = 1e-6  # in the released code's LID


@dataclass(frozen=True)
class Course:
    """Which round belongs to which stage, and whom it asks."""

    settings: Correction
    held: Split  # the training data by client
    rounds: int

    def __post_init__(self) -> None:
        if self.rounds <= self.first:
            raise EvenhandError(
                f"FedCorr's first stage takes {self.first:,} rounds ({self.settings.iterations} iterations over "
                f"{len(self.clients):,} clients, {self.settings.together} a round), and there are {self.rounds:,}; "
                "give it more rounds, fewer iterations (iterations=2) or more clients at once (together=10)"
            )

    @property
    def clients(self) -> Indices:
        return np.flatnonzero(self.held.sizes > 0)

    @property
    def turns(self) -> int:
        """Rounds of an iteration."""
        return -(-len(self.clients) // self.settings.together)

    @property
    def first(self) -> int:
        """Rounds of the first stage."""
        return self.settings.iterations * self.turns

    @property
    def second(self) -> int:
        """Rounds of the second stage."""
        return round(self.settings.fine_tuning * (self.rounds - self.first))

    def stage(self, index: int) -> int:
        return 1 if index < self.first else 2 if index < self.first + self.second else 3

    def judges(self, index: int) -> bool:
        """Whether an iteration, or the second stage, ends with this round."""
        if self.stage(index) == 1:
            return (index + 1) % self.turns == 0
        return self.stage(index) == 2 and index + 1 == self.first + self.second

    def asked(self, index: int, seed: int, sampling: Sampling, memo: Memo) -> Indices:
        """The clients of a round, in ascending order."""
        sizes, stage = self.held.sizes, self.stage(index)
        if stage == 3:
            return sampling.draw(seed, index, sizes)
        if stage == 1:
            iteration, turn = divmod(index, self.turns)
            order = stream(seed, "correction", iteration).permutation(self.clients)
            return np.sort(order[turn * self.settings.together : (turn + 1) * self.settings.together])
        clean = self.clients[memo["levels"][self.clients] <= self.settings.clean]
        few = replace(sampling, cohort=min(sampling.count(len(sizes)), len(clean)))
        return np.asarray(clean[few.draw(seed, index, sizes[clean])])

    def pulls(self, index: int, clients: Indices, memo: Memo) -> Floats:
        """How strongly each client is pulled towards the received model."""
        return np.asarray(self.settings.beta * memo["levels"][clients] * (self.stage(index) == 1))

    # ---- what is carried from round to round

    def start(self, labels: Indices) -> dict[str, Any]:
        """Nothing is known yet; labels: of `held.indices`, as the clients have them."""
        clients = len(self.held)
        return {
            "labels": labels.copy(),
            "levels": np.zeros(clients),  # share of wrong labels, as estimated
            "noisy": np.zeros(clients, dtype=np.int64),
            "dimensions": np.zeros(clients),  # sums of LIDs
            "heard": np.zeros(clients, dtype=np.int64),  # how many LIDs
            "losses": np.full(len(self.held.indices), np.nan),  # of each sample at its owner's last model
        }

    def own(self, client: int) -> slice:
        """The places of a client's samples."""
        return slice(int(self.held.offsets[client]), int(self.held.offsets[client + 1]))

    def hear(self, memo: Memo, client: int, said: Floats) -> dict[str, Any]:
        """Take in what a client's own model says (log-probabilities) of its data."""
        found = {name: np.copy(memo[name]) for name in ("dimensions", "heard", "losses")}
        found["dimensions"][client] += dimensions(np.exp(said), self.settings.neighbours).mean()
        found["heard"][client] += 1
        found["losses"][self.own(client)] = -said[np.arange(len(said)), memo["labels"][self.own(client)]]
        return {**memo, **found}

    def judge(self, memo: Memo, seed: int) -> dict[str, Any]:
        """After an iteration: who is noisy, and how much."""
        noisy, levels = np.zeros(len(self.held), dtype=np.int64), np.zeros(len(self.held))
        known = np.flatnonzero(memo["heard"] > 0)
        noisy[known] = upper(memo["dimensions"][known] / memo["heard"][known], seed)
        for client in np.flatnonzero(noisy).tolist():
            levels[client] = upper(memo["losses"][self.own(client)], seed).mean()
        return {**memo, "noisy": noisy, "levels": levels}

    def correct(self, memo: Memo, client: int, said: Floats, *, all_samples: bool) -> tuple[dict[str, Any], int]:
        """A noisy client takes the shared model's labels where that is sure; and how many it changed."""
        labels, own = np.copy(memo["labels"]), self.own(client)
        sure = np.exp(said.max(axis=1)) > self.settings.confidence
        if not all_samples:
            count = int(len(said) * memo["levels"][client] * self.settings.ratio)
            worst = np.argsort(-memo["losses"][own], kind="stable")[:count]
            sure &= np.isin(np.arange(len(said)), worst)
        before = labels[own].copy()
        labels[own] = np.where(sure, said.argmax(axis=1), before)
        return {**memo, "labels": labels}, int((labels[own] != before).sum())


def dimensions(answers: Floats, neighbours: int) -> Floats:
    """Local intrinsic dimension of every row, from the distances to its nearest other rows (Amsaleg et al., 2015)."""
    count = min(neighbours, len(answers) - 1)
    if count < 1:
        return np.zeros(len(answers))
    from scipy.spatial.distance import cdist  # slow to load, and nobody else's

    nearest = np.sort(cdist(answers, answers), axis=1)[:, 1 : count + 1]
    with np.errstate(divide="ignore"):  # a neighbour at distance 0 makes the dimension 0
        return np.asarray(-count / (np.log(nearest / (nearest[:, -1:] + EPSILON)).sum(axis=1) + EPSILON))


def upper(values: Floats, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which numbers belong to the upper one of two Gaussians; none where there are not two different numbers."""
    if not np.isfinite(values).all() or len(np.unique(values)) < 2:
        return np.zeros(len(values), dtype=bool)
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.mixture import GaussianMixture  # type: ignore[import-untyped]

    column = values.reshape(-1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture = GaussianMixture(n_components=2, random_state=seed % 2**32).fit(column)
    return np.asarray(mixture.predict(column) != np.argmin(mixture.means_[:, 0]))


@torch.no_grad()
def log_probabilities(module: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor, at_once: int) -> Floats:
    """What a model says of some samples (samples x classes, float64)."""
    with answering(module):
        parts = [inputs[start : start + at_once] for start in range(0, len(inputs), at_once)]
        scores = [functional_call(module, dict(tensors), (part,)) for part in parts]
    return np.asarray(torch.log_softmax(torch.cat(scores).double(), dim=-1).cpu().numpy())
