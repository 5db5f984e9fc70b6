"""What a method asks of the clients of a federation."""

from __future__ import annotations

from typing import Any

from evenhand.checks import EvenhandError
from evenhand.constraints import Cells
from evenhand.engine.groups import looks_at_groups
from evenhand.engine.wishes import wants_trained
from evenhand.flower import wire
from evenhand.methods import Method

REPORTED = ("losses", "sizes", "accuracies", "fairness", "fairness_global")


def can_federate(chosen: Method, cells: Cells | None, lr: Any) -> None:
    """Insist, before anything is sent, that a method can be run over a federation as described."""
    if chosen.training != "federated":
        raise EvenhandError(f"{chosen.name} trains without a federation; it runs in the simulator alone")
    if getattr(chosen.objective, "fedlf_code", False) or "accuracies" in wants_trained(chosen):
        raise EvenhandError(
            f"{chosen.name} as published code has it (fedlf_code, accuracies=trained) runs in the simulator alone"
        )
    missing = [name for name in chosen.rule.inputs if name not in REPORTED]
    if missing:
        raise EvenhandError(f"{chosen.name} needs {' and '.join(missing)}, which clients do not report")
    if looks_at_groups(chosen) and cells is None:
        raise EvenhandError(
            f"{chosen.name} looks at groups of people, and nobody said what they are: name them in [schema.sensitive] "
            "of a deployment, or pass FairStrategy(cells=...)"
        )
    asks = [part for part in (chosen.rule, chosen.server) if part.lr_setting and getattr(part, part.lr_setting) is None]
    if asks and lr is None:
        raise EvenhandError(
            f"{chosen.name} needs the clients' learning rate: FairStrategy(lr=...), or its setting {asks[0].lr_setting}"
        )


def surveys_first(chosen: Method) -> bool:
    """Whether what clients are told in training depends on all of them, so that they are asked beforehand."""
    return chosen.objective.grouped and not chosen.objective.alone


def wanted(chosen: Method, measure: str) -> list[str]:
    """What clients are asked to measure besides training."""
    if looks_at_groups(chosen):  # the sums by cell say it all
        return [wire.BY_CELL]
    needs = {"losses", "accuracies"} & set(chosen.rule.inputs)
    found = [wire.BEFORE] if needs or measure == "losses" else []
    return [*found, wire.AFTER] if "losses" in wants_trained(chosen) else found
