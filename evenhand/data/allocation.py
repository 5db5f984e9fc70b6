"""The ways to hand a pool of samples out to clients. Each returns, for every sample, the client that holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evenhand.checks import EvenhandError, choice, flag, near_miss, number
from evenhand.data.attributes import UNKNOWN, Attribute
from evenhand.data.splitting import apportion

CLIENTS = 100  # when the caller names no number


@dataclass(frozen=True)
class Pool:
    """The samples to hand out: their labels, their columns by name, and groups of them by the names of columns."""

    name: str
    labels: np.ndarray
    classes: int
    column: Callable[[str], np.ndarray]
    groups: Callable[[Sequence[str]], Attribute]
    sensitive: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Allocation:
    """The holder of each sample (-1: nobody), the number of clients, and what is worth knowing."""

    owner: np.ndarray
    clients: int
    names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def iid(pool: Pool, argument: str, clients: int | None, min_size: int | None, rng: np.random.Generator) -> Allocation:
    """Every client an equal, random share."""
    _no_argument("iid", argument)
    count = clients or CLIENTS
    return Allocation(_dealt(len(pool), apportion(len(pool), np.ones(count)), rng), count)


def sizes(
    pool: Pool,
    argument: str,
    clients: int | None,
    min_size: int | None,
    rng: np.random.Generator,
    *,
    mean: float = 4.0,
    sigma: float = 2.0,
    base: int = 50,
) -> Allocation:
    """Labels iid, sizes in proportion to int(lognormal(mean, sigma)) + base: FedProx's "power law"."""
    choice("sizes", argument or "lognormal", ("lognormal",))
    number("mean", mean)
    number("sigma", sigma, low=0)
    number("base", base, low=0, whole=True)
    count = clients or CLIENTS
    least = min(1, len(pool) // count) if min_size is None else min_size
    if least * count > len(pool):
        raise EvenhandError(f"{count:,} clients of at least min_size={least} need more than {len(pool):,} samples")
    weights = np.floor(rng.lognormal(mean, sigma, count)) + base + 1e-9
    shares = least + apportion(len(pool) - least * count, weights)
    return Allocation(_dealt(len(pool), shares, rng), count)


def _dealt(count: int, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.repeat(np.arange(len(shares)), shares))


def pat(
    pool: Pool,
    argument: str,
    clients: int | None,
    min_size: int | None,
    rng: np.random.Generator,
    *,
    pairing: str = "random",
    balance: bool = True,
) -> Allocation:
    """K classes per client, sizes as equal as the classes allow.

    pairing="random": classes drawn at random, each by as many clients as its size deserves. pairing="block": FedLF's
    code, where each class in order goes to the first clients with room, so that only few kinds of client exist.
    balance=False: an option of the same code. Of a class every client gets between a tenth and the whole of an equal
    share, and the last one what is left.
    """
    choice("pairing", pairing, ("random", "block"))
    flag("balance", balance)
    each = _whole("pat", argument, "classes per client")
    count = clients or CLIENTS
    present = [int(c) for c in np.flatnonzero(np.bincount(pool.labels, minlength=pool.classes))]
    if each > len(present):
        raise EvenhandError(f"pat:{each} asks for {each} classes per client, but {pool.name} has {len(present)}")
    members = {c: rng.permutation(np.flatnonzero(pool.labels == c)) for c in present}
    if pairing == "block":
        holders = _block_holders(count, each, present)
    else:
        holders = _random_holders(count, each, {c: len(m) for c, m in members.items()}, rng)
    owner = np.full(len(pool), -1, np.int64)
    for c, chosen in holders.items():
        if len(chosen):
            shares = apportion(len(members[c]), np.ones(len(chosen)))
            owner[members[c]] = np.repeat(chosen, shares if balance else _unbalanced(shares, rng))
    return Allocation(owner, count)


def _unbalanced(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All but the last get between a tenth and the whole of an equal share, at least one sample; the last the rest."""
    most = int(shares.min())
    if most < 2:
        return shares
    drawn = rng.integers(max(1, most // 10), most, len(shares) - 1)
    return np.append(drawn, shares.sum() - drawn.sum())


def _block_holders(clients: int, each: int, present: Sequence[int]) -> dict[int, np.ndarray]:
    room = np.full(clients, each)
    share = clients * each // len(present)
    if share == 0:
        raise EvenhandError(f"pat:{each}, pairing=block: {clients} clients cannot hold {len(present)} classes")
    holders = {}
    for c in present:
        holders[c] = np.flatnonzero(room > 0)[:share]
        room[holders[c]] -= 1
    return holders


def _random_holders(clients: int, each: int, counts: dict[int, int], rng: np.random.Generator) -> dict[int, np.ndarray]:
    present, amounts = np.array(list(counts)), np.array(list(counts.values()))
    remaining = _places(clients, each, amounts, rng)
    scores = rng.gumbel(size=(clients, len(present)))
    held = np.zeros((clients, len(present)), bool)
    with np.errstate(divide="ignore"):
        for client in range(clients):
            # Weighted by places left; a class with as many places as clients left must be taken now.
            score = np.where(remaining == clients - client, np.inf, scores[client] + np.log(remaining))
            held[client, np.argpartition(-score, each - 1)[:each]] = True
            remaining -= held[client]
    held = held[rng.permutation(clients)]
    return {int(c): rng.permutation(np.flatnonzero(held[:, place])) for place, c in enumerate(present)}


def _places(clients: int, each: int, amounts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many clients hold each class: in proportion to its size, at most all of them, at least one where possible."""
    total, least = clients * each, int(clients * each >= len(amounts))
    ideal = total * amounts / amounts.sum() + 1e-6 * rng.random(len(amounts))
    places = np.clip(np.floor(ideal).astype(np.int64), least, clients)
    while gap := total - int(places.sum()):
        step = 1 if gap > 0 else -1
        room = np.flatnonzero(places < clients if gap > 0 else places > least)
        wanting = np.argsort(-step * (ideal - places)[room], kind="stable")[: abs(gap)]
        places[room[wanting]] += step
    return places


def shards(
    pool: Pool, argument: str, clients: int | None, min_size: int | None, rng: np.random.Generator
) -> Allocation:
    """Sorted by label, cut into equal shards, S random shards per client (FedAvg, FedFV)."""
    each = _whole("shards", argument, "shards per client")
    count = clients or CLIENTS
    total = count * each
    edges = np.arange(total + 1) * len(pool) // total
    owner = np.empty(len(pool), np.int64)
    owner[np.argsort(pool.labels, kind="stable")] = np.repeat(rng.permutation(total) // each, np.diff(edges))
    return Allocation(owner, count)


def dirichlet(
    pool: Pool,
    argument: str,
    clients: int | None,
    min_size: int | None,
    rng: np.random.Generator,
    *,
    per: str = "class",
    cap: float | None = 1.0,
    balance: bool = True,
) -> Allocation:
    """Label skew by Dirichlet(ALPHA); small ALPHA concentrates.

    per="class" (FedLF, NIID-Bench): each class is divided by shares ~ Dir(ALPHA) over the clients; a client that
    already holds `cap` times the mean size gets no more (None: no cap); redrawn until the smallest client has
    min_size samples (default: the number of classes). per="client" (flgo): each client's label shares ~ Dir(ALPHA *
    class frequencies), sizes equal, or lognormal with balance=False; instead of flgo's redrawing until the clients
    add up to the pool, the table is scaled to it.
    """
    alpha = _float("dir", argument, "the concentration ALPHA")
    choice("per", per, ("class", "client"))
    flag("balance", balance)
    if cap is not None:
        number("cap", cap, low=1)
    count = clients or CLIENTS
    wanted = pool.classes if min_size is None else min_size
    limit = np.inf if cap is None else cap * len(pool) / count
    tries = int(np.clip(2_000_000 / (count * pool.classes), 10, 1000))
    best, smallest = np.empty(0, np.int64), -1
    for _ in range(tries):
        if per == "class":
            owner = _by_class(pool, alpha, count, limit, rng)
        else:
            owner = _by_client(pool, alpha, count, balance, rng)
        least = int(np.bincount(owner, minlength=count).min())
        if least > smallest:
            best, smallest = owner, least
        if smallest >= wanted or wanted * count > len(pool):
            break
    if smallest >= wanted:
        return Allocation(best, count)
    reached = f"the smallest client has {smallest} samples, {wanted} wanted"
    if min_size is not None:
        raise EvenhandError(
            f"dir:{alpha:g}: {reached}, in {tries} draws over {count:,} clients; "
            "lower min_size, raise ALPHA or use fewer clients"
        )
    return Allocation(best, count, notes=(f"{reached}: the best of {tries} draws",))


def _by_class(pool: Pool, alpha: float, clients: int, limit: float, rng: np.random.Generator) -> np.ndarray:
    owner = np.empty(len(pool), np.int64)
    held = np.zeros(clients, np.int64)
    for c in range(pool.classes):
        members = rng.permutation(np.flatnonzero(pool.labels == c))
        open_to = held < limit
        shares = rng.dirichlet(np.full(clients, alpha)) * open_to
        if not shares.sum() > 0:  # every open client's share was too small for a number
            shares = open_to.astype(float)
        edges = np.floor(np.cumsum(shares) / shares.sum() * len(members)).astype(np.int64)
        edges[-1] = len(members)
        amounts = np.diff(edges, prepend=0)
        owner[members] = np.repeat(np.arange(clients), amounts)
        held += amounts
    return owner


def _by_client(pool: Pool, alpha: float, clients: int, balance: bool, rng: np.random.Generator) -> np.ndarray:
    counts = np.bincount(pool.labels, minlength=pool.classes)
    present = np.flatnonzero(counts)
    volumes = np.ones(clients) if balance else rng.lognormal(0.0, 1.0, clients)
    volumes *= len(pool) / volumes.sum()
    table = np.maximum(rng.dirichlet(alpha * counts[present] / len(pool), clients), 1e-12)
    for _ in range(100):
        table *= (volumes / table.sum(axis=1))[:, None]
        table *= counts[present] / table.sum(axis=0)
    owner = np.empty(len(pool), np.int64)
    for place, c in enumerate(present):
        members = rng.permutation(np.flatnonzero(pool.labels == c))
        owner[members] = np.repeat(np.arange(clients), apportion(len(members), table[:, place]))
    return owner


def natural(
    pool: Pool, argument: str, clients: int | None, min_size: int | None, rng: np.random.Generator
) -> Allocation:
    """One client per value of a column; `clients` draws some of them, `min_size` leaves small ones out."""
    column = argument or "client"
    values, place = np.unique(pool.column(column), return_inverse=True)
    amounts = np.bincount(place, minlength=len(values))
    kept = np.flatnonzero(amounts >= (min_size or 1))
    notes = []
    if len(kept) < len(values):
        small = len(values) - len(kept)
        notes.append(
            f"{small:,} of {len(values):,} values of {column!r} left out: fewer than min_size={min_size} samples"
        )
    if clients is not None:
        if clients > len(kept):
            raise EvenhandError(
                f"natural:{column} has {len(kept):,} clients{_at_least(min_size)}, not clients={clients:,}"
            )
        if clients < len(kept):
            notes.append(f"{clients:,} of {len(kept):,} values of {column!r} drawn")
        kept = np.sort(rng.choice(kept, clients, replace=False))
    if not len(kept):
        raise EvenhandError(f"natural:{column} has no client{_at_least(min_size)}")
    number_of = np.full(len(values), -1, np.int64)
    number_of[kept] = np.arange(len(kept))
    names = tuple(str(values[v]) or "(missing)" for v in kept)
    return Allocation(number_of[place], len(kept), names, tuple(notes))


def _at_least(min_size: int | None) -> str:
    return f" of at least min_size={min_size} samples" if min_size else ""


# mFairFL's two tables, in percent: what each of five clients gets of its group 0, and what of its group 1.
SHARES = {
    "low": ("30/30/20/10/10", "10/20/20/20/30"),
    "high": ("50/10/10/20/10", "10/40/30/10/10"),
}


def shares(
    pool: Pool,
    argument: str,
    clients: int | None,
    min_size: int | None,
    rng: np.random.Generator,
    *,
    by: str = "sensitive",
) -> Allocation:
    """Given shares of each group to each client: `low` and `high` (mFairFL, five clients), or a table.

    The groups are those of the first sensitive attribute, or of column `by` (`sex+race`: of both, crossed). A table
    lists them in sorted order, `30/30/40,10/20/70`, or by name, `Private=80/20,*=20/80` (`*`: all others).

    mFairFL says neither which group is its group 0, nor how it hands out more than two groups or two attributes. Here
    the smallest group (unknown apart) is group 0 (Adult and COMPAS: women; Bank: the remaining ages, which the paper
    calls disadvantaged), all others are group 1, and of two attributes the first decides.
    """
    names = pool.sensitive[:1] if by == "sensitive" else tuple(name.strip() for name in by.split("+"))
    if not names:
        raise EvenhandError(
            f"shares:{argument} hands out groups of people, but {pool.name} has no sensitive attribute; name one "
            "(--sensitive, sensitive=...), or any column (by=...)"
        )
    groups = pool.groups(names)
    table = _share_table(argument, groups)
    count = table.shape[1]
    if clients not in (None, count):
        raise EvenhandError(
            f"shares:{argument} is a table for {count} clients, not clients={clients}; leave clients out, or choose "
            "another partition"
        )
    owner = np.empty(len(pool), np.int64)
    for group, row in enumerate(table):
        members = rng.permutation(np.flatnonzero(groups.codes == group))
        owner[members] = np.repeat(np.arange(count), apportion(len(members), row))
    return Allocation(owner, count)


def _share_table(argument: str, groups: Attribute) -> np.ndarray:
    """One row of shares per group, each summing to one."""
    names, by = groups.values, groups.name
    if argument in SHARES:
        first, others = (_share_row(figures, figures) for figures in SHARES[argument])
        sizes = {name: size for name, size in zip(names, groups.counts, strict=True) if size and name != UNKNOWN}
        smallest = min(sizes, key=sizes.__getitem__, default=UNKNOWN)
        return np.stack([first if name == smallest else others for name in names])
    if "/" not in argument:
        hint = "needs 'low', 'high' or a table such as 30/30/40,10/20/70"
        raise EvenhandError(f"shares:{argument} {hint}{near_miss(argument, SHARES)}")
    rows: dict[str, np.ndarray] = {}
    pieces = [piece.strip() for piece in argument.split(",") if piece.strip()]
    for place, piece in enumerate(pieces):
        name, equals, figures = piece.rpartition("=")
        if not equals and len(pieces) != len(names):
            raise EvenhandError(
                f"shares:{argument} has {len(pieces)} rows, but {by!r} has {len(names)} groups ({_few(names)}); "
                "name them, GROUP=SHARES, with * for all others"
            )
        name = name.strip() if equals else names[place]
        if name not in (*names, "*"):
            raise EvenhandError(f"shares: {by!r} has no group {name!r}{near_miss(name, names)} ({_few(names)})")
        rows[name] = _share_row(figures, piece)
    for name in names:
        if name not in rows and "*" not in rows:
            raise EvenhandError(f"shares:{argument} says nothing of group {name!r} of {by!r}; add {name}=... or *=...")
    table = [rows.get(name, rows.get("*", np.empty(0))) for name in names]
    if len({len(row) for row in table}) > 1:
        raise EvenhandError(f"shares:{argument}: every row must name the same number of clients")
    return np.stack(table)


def _few(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _share_row(figures: str, piece: str) -> np.ndarray:
    try:
        row = np.array([float(figure) for figure in figures.split("/")])
    except ValueError:
        raise EvenhandError(f"shares: {piece!r} is not a row of shares such as 30/30/40") from None
    if not (row >= 0).all() or not any(np.isclose(row.sum(), whole, atol=1e-6) for whole in (1, 100)):
        raise EvenhandError(
            f"shares: {piece!r} sums to {row.sum():g}; a group's shares sum to 100 (or 1), none negative"
        )
    return row / row.sum()


def _no_argument(kind: str, argument: str) -> None:
    if argument:
        raise EvenhandError(f"{kind} takes nothing after the colon, not {argument!r}")


def _whole(kind: str, argument: str, said: str) -> int:
    if not argument.isdigit() or int(argument) < 1:
        raise EvenhandError(f"{kind}:{argument} needs a whole number of {said}, such as {kind}:2")
    return int(argument)


def _float(kind: str, argument: str, said: str) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise EvenhandError(f"{kind}:{argument} needs {said}, a number above 0, such as {kind}:0.5")
    return value
