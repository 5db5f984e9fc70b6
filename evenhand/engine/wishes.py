"""What a method wants of the engine: the questions that a simulation, and a client of its own, ask about it."""

from __future__ import annotations

from evenhand.methods import Method
from evenhand.methods.server import Plain
from evenhand.objectives import Personal, PlainRisk, Proximal, Similarity

SEEN = ("losses", "accuracies")  # what a rule may want to know after local training


def needs_losses(method: Method) -> bool:
    """Whether the rule or the server step asks for anything measured on the participants' data."""
    return bool({"losses", "accuracies"} & set(method.rule.inputs))


def pull_of(method: Method, rate: float) -> float:
    """Strength of the squared pull towards the received model."""
    if isinstance(method.objective, Personal) and method.objective.fedlf_code:
        return method.objective.lam / pace_of(method, rate)
    return 0.0 if isinstance(method.objective, Similarity) else float(getattr(method.objective, "mu", 0.0))


def pace_of(method: Method, rate: float) -> float:
    """How many steps in one a client makes: one, but in FedLF's version of Ditto."""
    own = method.objective
    return 2.0 - rate * own.lam if isinstance(own, Personal) and own.fedlf_code else 1.0


def foreseeable(method: Method) -> bool:
    """Whether a round's outcome follows from the clients' sizes, whatever they say, and nothing is done beside it."""
    own, plain = method.server, isinstance(method.objective, (PlainRisk, Proximal))
    return method.rule.foreseen and isinstance(own, Plain) and own.eta == 1.0 and plain


def trains_personal(method: Method) -> bool:
    """Whether every client trains a model of its own besides the shared one."""
    return isinstance(method.objective, Personal) and not method.objective.fedlf_code


def sees_one_batch(method: Method) -> bool:
    """Whether clients see nothing but their first mini-batch."""
    return isinstance(method.objective, Proximal) and method.objective.fedlf_code


def likeness_of(method: Method) -> list[float]:
    """What each of the first layers counts in FedCKA's term; empty where there is none."""
    return method.objective.strengths if isinstance(method.objective, Similarity) else []


def mixup_of(method: Method) -> float:
    """The parameter of mixup's Beta distribution; 0 where nothing is mixed."""
    return float(getattr(method.objective, "mixup", 0.0))


def wants_trained(method: Method) -> set[str]:
    """What of the clients' losses and accuracies the rule wants to know after local training."""
    return {name for name in SEEN if getattr(method.rule, name, "received") == "trained"}
