"""Every method by name: one line each, a choice of objective, rule and server step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from evenhand.checks import EvenhandError, near_miss, plain_value
from evenhand.group_objectives import FairBatch, GroupConstraints, Reweighted
from evenhand.methods.adafed import AdaFed
from evenhand.methods.afl import AFL
from evenhand.methods.base import Rule, ServerStep
from evenhand.methods.drfl import DRFL
from evenhand.methods.even import Even
from evenhand.methods.fairfed import FairFed
from evenhand.methods.fedavg import FedAvg
from evenhand.methods.fedfa import FedFa, FedFaMomentum
from evenhand.methods.fedfv import FedFV
from evenhand.methods.fedgini import FedGini
from evenhand.methods.fedlf import FedLF
from evenhand.methods.fedmdfg import FedMDFG, LineSearch
from evenhand.methods.fedmgda import FedMGDAPlus
from evenhand.methods.mfairfl import MFairFL
from evenhand.methods.qffl import QFFL
from evenhand.methods.server import Average, FedAdagrad, FedAdam, FedAMSGrad, FedYogi, Momentum, Plain, Recent
from evenhand.methods.term import TERM
from evenhand.objectives import ClientMomentum, Correction, Objective, Personal, PlainRisk, Proximal, Similarity
from evenhand.tables import Listing, text_table

Part = TypeVar("Part", Objective, Rule, ServerStep)
Settings = Mapping[str, Any]

DEFAULT = "even"


@dataclass(frozen=True)
class Method:
    """A named choice of local objective, weighting rule and server step. Frozen, comparable, dict-able."""

    name: str
    rule: Rule
    server: ServerStep = Plain()
    objective: Objective = PlainRisk()
    training: str = "federated"  # or "alone" (no client hears of another), "pooled" (all data in one place)
    summary: str = ""  # where it says more than the rule's own first line
    paper: str = ""
    when: str = ""  # where it says something else than the parts
    when_not: str = ""

    def __str__(self) -> str:
        said = f"{self.name}({_spoken(self.rule)})"
        if self.server != Plain():
            said += f", server {self.server.name}({_spoken(self.server)})"
        if self.objective != PlainRisk():
            said += f", objective {self.objective.name}({_spoken(self.objective)})"
        return said

    @property
    def written(self) -> str:
        """As one writes it: the name, other parts than the named method's, and settings that are not theirs.

        >>> method("fedfv", alpha=0.2, server="fedadam:beta1=0.5").written
        'fedfv:alpha=0.2,server=fedadam,beta1=0.5'
        """
        named, taken, words = METHODS.get(self.name, self), set[str](), list[str]()
        for kind, part, own, known in (
            ("rule", self.rule, named.rule, {}),
            ("server", self.server, named.server, SERVERS),
            ("objective", self.objective, named.objective, OBJECTIVES),
        ):
            here = _values(part)
            there = _values(own if own.name == part.name else known.get(part.name, own))
            changed = [f"{name}={value}" for name, value in here.items() if there.get(name, ...) != value]
            hidden = [word for word in changed if word.partition("=")[0] in taken]  # would be read as another part's
            if own.name != part.name or hidden:
                words.append(f"{kind}={':'.join([part.name, *hidden[:1]])}")
            words += [word for word in changed if word not in hidden[:1]]
            taken |= here.keys()
        return self.name + (":" + ",".join(words) if words else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON, TOML); `Method.from_dict` gives back an equal method."""
        return {
            "name": self.name,
            "rule": _values(self.rule),
            "server": {"name": self.server.name, **_values(self.server)},
            "objective": {"name": self.objective.name, **_values(self.objective)},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Method:
        missing = [key for key in ("name", "rule", "server", "objective") if key not in values]
        if missing:
            raise EvenhandError(f"a method's dictionary needs {missing[0]!r}; it has {sorted(values)}")
        return method(values["name"], server=values["server"], objective=values["objective"], **values["rule"])

    def with_settings(self, settings: Settings) -> Method:
        """The same method with settings changed: looked up in the rule, then the server step, then the objective."""
        parts: dict[str, Any] = {"rule": self.rule, "server": self.server, "objective": self.objective}
        changes: dict[str, dict[str, Any]] = {key: {} for key in parts}
        for name, value in settings.items():
            owner = next((key for key, part in parts.items() if name in _values(part)), None)
            if owner is None:
                known = [known for part in parts.values() for known in _values(part)]
                listed = ", ".join(known) if known else "none"
                raise EvenhandError(
                    f"{self.name} has no setting {name!r}{near_miss(name, known)} (its settings: {listed})"
                )
            changes[owner][name] = value
        changed = {key: replace(part, **changes[key]) for key, part in parts.items() if changes[key]}
        return replace(self, **changed) if changed else self


def _values(part: Any) -> dict[str, Any]:
    return {entry.name: getattr(part, entry.name) for entry in fields(part)}


def _spoken(part: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in _values(part).items())


OBJECTIVES: dict[str, Objective] = {
    part.name: part
    for part in (
        PlainRisk(),
        Proximal(),
        ClientMomentum(),
        Personal(),
        Similarity(),
        Correction(),
        GroupConstraints(),
        FairBatch(),
        Reweighted(),
    )
}

SERVERS: dict[str, ServerStep] = {
    part.name: part
    for part in (
        Plain(),
        Momentum(),
        Average(),
        Recent(),
        FedAdam(),
        FedAMSGrad(),
        FedYogi(),
        FedAdagrad(),
        FedFaMomentum(),
        LineSearch(),
    )
}

DITTO = "FedAvg, and a personal model for every client that is pulled towards the shared one."
FEDCKA = "FedAvg whose clients keep their first layers like the received model's rather than like their own last ones."
FEDCORR = "Clients with wrong labels are found and their labels corrected; then FedAvg."
FEDPROX = "FedAvg whose clients stay near the received model."
MFAIRFL = "Group constraints by multipliers, and conflicts repaired up to a learned similarity of each pair of clients."
FPFL = "FedAvg under group constraints, whose multipliers are damped and kept at the server."
FEDFB = "FedAvg whose samples weigh by group and label, until the groups' positive rates meet."
FEDAVG_F = "FedAvg of clients who each keep the group constraints on their own data."
INDFAIR = "No federation: each client keeps the group constraints alone; the mixture of all models is measured."
CENFAIR = "No federation: all data in one place, under group constraints."
LOCAL = GroupConstraints(multipliers="client")
FEDOPT = "FedAvg's mean, applied by {} at the server."

METHODS: dict[str, Method] = {
    entry.name: entry
    for entry in (
        Method("even", Even(), server=Recent()),
        Method("fedavg", FedAvg()),
        Method("fedprox", FedAvg(), objective=Proximal(), summary=FEDPROX, paper="Li et al., MLSys 2020"),
        Method("fedcka", FedAvg(), objective=Similarity(), summary=FEDCKA, paper="Son et al., Appl. Sci. 2022"),
        Method("fedcorr", FedAvg(), objective=Correction(), summary=FEDCORR, paper="Xu et al., CVPR 2022"),
        Method("ditto", FedAvg("uniform"), objective=Personal(), summary=DITTO, paper="Li et al., ICML 2021"),
        Method("qffl", QFFL()),
        Method("afl", AFL(), server=Average()),
        Method("term", TERM()),
        Method("drfl", DRFL()),
        Method("fedgini", FedGini()),
        Method("fedmgda+", FedMGDAPlus()),
        Method("fedfv", FedFV()),
        Method("fedmdfg", FedMDFG(), server=LineSearch()),
        Method("fedlf", FedLF()),
        Method("adafed", AdaFed()),
        Method("fedfa", FedFa(), server=FedFaMomentum(), objective=ClientMomentum()),
        Method("mfairfl", MFairFL(), objective=GroupConstraints(), summary=MFAIRFL),
        Method(
            "fpfl",
            FedAvg(),
            objective=GroupConstraints(damping=1.0),
            summary=FPFL,
            paper="Rodriguez-Galvez et al., 2021",
            when="The first choice for fairness to groups of people: constraints, with damped multipliers that hold on "
            "Bank under all seeds, where those of mfairfl do not.",
            when_not="For fairness between clients, which it does not look at, or where clients may not report sums "
            "over groups: then fedavg-f.",
        ),
        Method("fedfb", FedAvg(), objective=FairBatch(), summary=FEDFB, paper="Zeng et al., 2021"),
        Method("fairfed", FairFed(), objective=Reweighted()),
        Method(
            "fedavg-f",
            FedAvg(),
            objective=LOCAL,
            summary=FEDAVG_F,
            paper=MFairFL.paper,
            when="Fairness to groups where nothing about groups may leave a client: each keeps its own multipliers.",
            when_not="Where clients lack a group or hold little of it: nobody can constrain what it does not see. With "
            "large steps of the multipliers (gamma 3) it swings on Adult.",
        ),
        Method(
            "indfair",
            FedAvg(),
            objective=LOCAL,
            training="alone",
            summary=INDFAIR,
            paper=MFairFL.paper,
            when="As a reference: what every client reaches alone.",
            when_not="As a way to train one model: there is none.",
        ),
        Method(
            "cenfair",
            FedAvg(),
            objective=LOCAL,
            training="pooled",
            summary=CENFAIR,
            paper=MFairFL.paper,
            when="As a reference: what one client with everybody's data reaches.",
            when_not="Where data may not be pooled, which is where federated learning is used at all.",
        ),
        Method("fedadam", FedAvg(), server=FedAdam(), summary=FEDOPT.format("Adam"), paper="Reddi et al., ICLR 2021"),
        Method(
            "fedamsgrad", FedAvg(), server=FedAMSGrad(), summary=FEDOPT.format("AMSGrad"), paper="Tong et al., 2020"
        ),
        Method("fedyogi", FedAvg(), server=FedYogi(), summary=FEDOPT.format("Yogi"), paper="Reddi et al., ICLR 2021"),
        Method(
            "fedadagrad",
            FedAvg(),
            server=FedAdagrad(),
            summary=FEDOPT.format("Adagrad"),
            paper="Reddi et al., ICLR 2021",
        ),
    )
}


def method(
    name: str | Method | Mapping[str, Any] = DEFAULT,
    *,
    server: str | ServerStep | Mapping[str, Any] | None = None,
    objective: str | Objective | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Method:
    """A method by name, with its settings: `method("adafed", gamma=1, server="fedadam:eta=0.01")`.

    The name may carry settings too, another server step or objective among them, whose own settings follow:
    `"fedfv:alpha=0.1,tau=10"`, `"fedavg:server=recent,rounds=10"`. A Method or its dictionary is accepted as well.
    """
    if isinstance(name, Method):
        chosen = name
    elif isinstance(name, Mapping):
        chosen = Method.from_dict(name)
    else:
        word, written = parse(name)
        if word not in METHODS:
            raise EvenhandError(
                f"unknown method {word!r}{near_miss(word, METHODS)} (evenhand methods lists all {len(METHODS)})"
            )
        own = {part: written.pop(part) for part in ("server", "objective") if part in written}
        chosen = _with_parts(METHODS[word], **own).with_settings(written)
    given = {part: word for part, word in (("server", server), ("objective", objective)) if word is not None}
    return _with_parts(chosen, **given).with_settings(settings)


def _with_parts(chosen: Method, **parts: Any) -> Method:
    """The same method with another server step or objective."""
    if "server" in parts:
        chosen = replace(chosen, server=_part(parts["server"], SERVERS, ServerStep, "server step"))
    if "objective" in parts:
        chosen = replace(chosen, objective=_part(parts["objective"], OBJECTIVES, Objective, "objective"))
    return chosen


def _part(given: Any, known: Mapping[str, Part], kind: type[Part], spoken: str) -> Part:
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        settings = dict(given)
        word = settings.pop("name", None)
    else:
        word, settings = parse(given)
    if word not in known:
        raise EvenhandError(f"unknown {spoken} {word!r}{near_miss(word, known)} (known: {', '.join(known)})")
    part = known[word]
    for name in settings:
        if name not in _values(part):
            raise EvenhandError(
                f"{spoken} {word} has no setting {name!r}{near_miss(name, _values(part))} "
                f"(its settings: {', '.join(_values(part)) or 'none'})"
            )
    return replace(part, **settings)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`"fedfv:alpha=0.1,order=reverse"` -> `("fedfv", {"alpha": 0.1, "order": "reverse"})`."""
    if not isinstance(text, str):
        raise EvenhandError(f"a method is given by name, not as {type(text).__name__}")
    name, _, written = text.partition(":")
    settings = {}
    for item in filter(None, (piece.strip() for piece in written.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise EvenhandError(f"{item!r} in {text!r} is not of the form setting=value")
        settings[key.strip()] = plain_value(value.strip())
    return name.strip(), settings


def register(entry: Method) -> Method:
    """Make a method of your own known by its name, to `method`, `aggregate` and everything built on them."""
    if entry.name in METHODS and METHODS[entry.name] != entry:
        raise EvenhandError(f"a method named {entry.name!r} is there already; choose another name")
    METHODS[entry.name] = entry
    return entry


@dataclass(frozen=True)
class MethodInfo:
    """What there is to know of a method before using it."""

    name: str
    summary: str
    paper: str
    needs: tuple[str, ...]  # inputs of `aggregate`
    groups: bool  # whether its clients are told about groups of people in training
    settings: Mapping[str, Any]
    when: str = ""  # when to use it
    when_not: str = ""


class MethodTable(Listing[MethodInfo]):
    """The known methods; prints as a table."""

    def __repr__(self) -> str:
        rows = [("method", "needs", "paper", "what it does")]
        needs = [(*e.needs, *(("groups",) if e.groups else ())) for e in self._entries]
        rows += [(e.name, ", ".join(n) or "-", e.paper, e.summary) for e, n in zip(self._entries, needs, strict=True)]
        return text_table(rows)


def methods() -> MethodTable:
    """Every known method: name, what it does, its paper, the inputs it needs, its settings and their defaults."""
    return MethodTable([_info(entry) for entry in METHODS.values()])


methods.__name__ = (
    __name__  # Python looks here in `import evenhand.methods.even as room`, past the function of the name
)


def _info(entry: Method) -> MethodInfo:
    summary = entry.summary or (type(entry.rule).__doc__ or "").strip().split("\n")[0]
    settings = {**_values(entry.objective), **_values(entry.server), **_values(entry.rule)}
    asks = any(part.lr_setting and getattr(part, part.lr_setting) is None for part in (entry.rule, entry.server))
    needs = (*entry.rule.inputs, *(("lr",) if asks else ()))
    paper, groups = entry.paper or entry.rule.paper, entry.objective.grouped
    return MethodInfo(entry.name, summary, paper, needs, groups, settings, *_advice(entry))


def _advice(entry: Method) -> tuple[str, str]:
    """When to use it and when not: the method's own words, else those of the part that sets it apart from FedAvg."""
    parts = (entry.objective, entry.server, entry.rule) if isinstance(entry.rule, FedAvg) else (entry.rule,)
    said = next((part for part in (entry, *parts) if part.when), entry.rule)
    return said.when, said.when_not
