"""Long-vector forms of every aggregation rule, straight from the papers, as oracles for the fast ones.

Nothing here is clever: each function walks through its paper's algorithm box with the clients' full update
vectors in float64, so that a reader with the paper open can check it line by line. Common conventions:

* `updates` is (m, d); row k is g_k = theta - theta_k. The returned `update` is (d,); the new model is
  theta - update.
* A stateful rule takes the previous round's `state` (None at first) and returns (update, new state); the
  given state is never changed.
* A vector has vanished when its length is at most 1e-12 times the summed lengths of the terms it was added
  up from: only rounding is left of it, and no direction can be read off it.
"""

import itertools

import numpy as np
import scipy.optimize
import torch

VANISHED = 1e-12
LARGEST_COSINE_GOAL = 1 - 1e-6


# Vectors


def norms_of(rows):
    """Euclidean length of every row."""
    return np.array([np.linalg.norm(row) for row in rows])


def vanished(vector, summed_lengths):
    """Whether only rounding is left of a vector added up from terms with these summed lengths."""
    return np.linalg.norm(vector) <= VANISHED * summed_lengths


def rescale(vector, target_length, summed_lengths=0.0):
    """The vector with another length (FedFV Algorithm 1, line 10), or zero if it has vanished."""
    if vanished(vector, summed_lengths):
        return np.zeros_like(vector)
    return vector / np.linalg.norm(vector) * target_length


def weighted_sum(weights, rows):
    """Sum of weight times row, term by term."""
    total = np.zeros(rows.shape[1])
    for weight, row in zip(weights, rows, strict=True):
        total = total + weight * row
    return total


def normalised(values):
    """Non-negative values divided by their sum; uniform if all are zero."""
    values = np.asarray(values, dtype=float)
    total = values.sum()
    return values / total if total > 0 else np.full(len(values), 1 / len(values))


# Memory of absent clients


def remember(memory, updates, losses, clients, round):
    """The memory (client -> its latest round, update and loss) after this round."""
    memory = dict(memory)
    for client, update, loss in zip(clients, updates, losses, strict=True):
        memory[client] = {"round": round, "update": np.array(update), "loss": float(loss)}
    return memory


def recall(memory, clients, round, absent):
    """Remembered records of absent clients, oldest first, each with its age (FedLF appendix A.1)."""
    if absent == "off":
        return []
    if absent == "expected":
        oldest = len(set(memory) | set(clients)) / len(clients)
    else:
        kind, oldest = absent.split(":")
        if kind != "last":
            raise ValueError(f"unknown memory {absent!r}: use 'off', 'last:TAU' or 'expected'")
        oldest = int(oldest)
    records = [
        {**record, "client": client, "age": round - record["round"]}
        for client, record in memory.items()
        if client not in clients and 1 <= round - record["round"] <= oldest
    ]
    return sorted(records, key=lambda record: -record["age"])


# Weighted averages


def fedavg(updates, sizes=None):
    """FedAvg (McMahan et al. 2017, Algorithm 1): mean weighted by data size, uniform without sizes."""
    sizes = np.ones(len(updates)) if sizes is None else sizes
    return weighted_sum(normalised(sizes), updates)


def qffl(updates, losses, q, lipschitz):
    """q-FedAvg (Li et al. 2020, Algorithm 2) for positive losses; L is 1 / local step size."""
    numerator = np.zeros(updates.shape[1])
    denominator = 0.0
    for update, loss in zip(updates, losses, strict=True):
        gradient = lipschitz * update
        numerator = numerator + loss**q * gradient
        denominator += q * loss ** (q - 1) * (gradient @ gradient) + lipschitz * loss**q
    return numerator / denominator


def term(updates, losses, t):
    """TERM (Li et al. 2021, the intended federated form): weights softmax(t F)."""
    tilts = t * np.asarray(losses, dtype=float)
    return weighted_sum(normalised(np.exp(tilts - tilts.max())), updates)


def drfl(updates, losses, q):
    """DRFL (Zhao and Joshi 2022): weights proportional to F^q."""
    return weighted_sum(normalised(np.asarray(losses, dtype=float) ** q), updates)


def fedgini(updates, losses, epsilon):
    """FedGini (Li et al. 2023): weights grow with the rank of the loss; ties share their weights."""
    number = len(losses)
    if number == 1:
        return np.array(updates[0])
    divisor = (number - 1) * number * (number + 1) / 3
    by_rank = [1 + (1 - epsilon) * (rank + 1) * rank / divisor for rank in range(number)]
    weights = []
    for loss in losses:
        smaller = sum(other < loss for other in losses)
        equal = sum(other == loss for other in losses)
        weights.append(np.mean(by_rank[smaller : smaller + equal]))
    return weighted_sum(normalised(weights), updates)


def project_to_simplex(point):
    """Euclidean projection onto the simplex (AFL): max(point - threshold, 0), the threshold by bisection."""
    point = np.asarray(point, dtype=float)
    low, high = point.max() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(point - middle, 0).sum() > 1:
            low = middle
        else:
            high = middle
    # The bisection decides who stays positive; their threshold then has a closed form without its error.
    positive = point > high
    if not positive.any():
        positive = point >= point.max()
    threshold = (point[positive].sum() - 1) / positive.sum()
    return np.where(positive, np.maximum(point - threshold, 0), 0.0)


def afl(updates, losses, clients, state, step):
    """AFL (Mohri et al. 2019, stochastic AFL): descent on the model, projected ascent on the client weights.

    Returns (update, state, offset) with offset = averaged model minus new model.
    """
    if state is None:
        weights = {client: 1 / len(clients) for client in clients}
        model, iterates = np.zeros(updates.shape[1]), []
    else:
        weights = dict(state["weights"])
        model, iterates = state["model"], list(state["iterates"])
        share_of_newcomer = np.mean(list(weights.values()))
        weights.update({client: share_of_newcomer for client in clients if client not in weights})
        weights = dict(zip(weights, normalised(list(weights.values())), strict=True))

    update = weighted_sum(normalised([weights[client] for client in clients]), updates)

    for client, loss in zip(clients, losses, strict=True):
        weights[client] += step * loss
    weights = dict(zip(weights, project_to_simplex(list(weights.values())), strict=True))

    model = model - update  # counted from the initial model, which the rule never sees
    iterates.append(model)
    offset = np.mean(iterates, axis=0) - model
    return update, {"weights": weights, "model": model, "iterates": iterates}, offset


# Shortest vectors


def shortest_step(vectors, residual, free):
    """Change of the free weights, summing to zero, that makes the residual sum as short as possible."""
    step = np.zeros(len(vectors))
    if len(free) < 2:
        return step
    pivot = min(free, key=lambda k: np.linalg.norm(vectors[k]))
    differences = {k: vectors[k] - vectors[pivot] for k in free if k != pivot}
    # Unit columns keep short vectors from being cut off as noise beside long ones; copies do nothing.
    lengths = {k: np.linalg.norm(difference) for k, difference in differences.items()}
    moving = [k for k in differences if lengths[k] > 0]
    if not moving:
        return step
    columns = np.column_stack([differences[k] / lengths[k] for k in moving])
    coefficients = np.linalg.lstsq(columns, -residual, rcond=None)[0]
    for k, coefficient in zip(moving, coefficients, strict=True):
        step[k] = coefficient / lengths[k]
    step[pivot] = -step.sum()
    return step


def entering_weights(slopes, tolerances, weights, lower, upper, free):
    """Fixed weights whose release shortens the sum: the worst placed one, or a pair if none is free."""
    may_grow = [k for k in range(len(weights)) if k not in free and weights[k] < upper[k]]
    may_shrink = [k for k in range(len(weights)) if k not in free and weights[k] > lower[k]]
    if not free:
        if not may_grow or not may_shrink:
            return []
        grows = min(may_grow, key=lambda k: slopes[k])
        shrinks = max(may_shrink, key=lambda k: slopes[k])
        gain = slopes[shrinks] - slopes[grows]
        return [grows, shrinks] if gain > tolerances[grows] + tolerances[shrinks] else []
    level = np.median([slopes[k] for k in free])
    gains = {k: level - slopes[k] for k in may_grow}
    for k in may_shrink:
        gains[k] = max(gains.get(k, -np.inf), slopes[k] - level)
    gains = {k: gain for k, gain in gains.items() if gain > tolerances[k]}
    return [max(gains, key=gains.get)] if gains else []


def optimality_gap(vectors, weights, lower, upper):
    """How much the squared length could still fall per weight moved from one vector to another, over 2."""
    slopes = vectors @ weighted_sum(weights, vectors)
    may_grow, may_shrink = weights < upper, weights > lower
    if not may_grow.any() or not may_shrink.any():
        return 0.0
    return max(0.0, slopes[may_shrink].max() - slopes[may_grow].min())


def min_norm_box(vectors, lower, upper):
    """Weights in the box, summing to 1, of the shortest weighted sum (FedMGDA+), by a primal active set."""
    vectors = np.asarray(vectors, dtype=float)
    lower, upper = np.asarray(lower, dtype=float), np.asarray(upper, dtype=float)
    if (lower > upper).any() or lower.sum() > 1 + 1e-9 or upper.sum() < 1 - 1e-9:
        raise ValueError(f"no weights between {lower} and {upper} sum to 1")

    # A feasible start: fill up the shortest vectors first.
    weights = lower.copy()
    for k in np.argsort(norms_of(vectors), kind="stable"):
        weights[k] = min(upper[k], lower[k] + max(0.0, 1 - weights.sum()))
    longest = norms_of(vectors).max()
    if longest == 0:
        return weights
    vectors = vectors / longest
    lengths = norms_of(vectors)

    free = [k for k in range(len(weights)) if lower[k] < weights[k] < upper[k]]
    settled = 0
    for _ in range(100 * (len(weights) + 10)):
        step = shortest_step(vectors, weighted_sum(weights, vectors), free)
        fraction, blocking, bound = 1.0, None, None
        for k in free:
            limit = upper[k] if step[k] > 0 else lower[k]
            if step[k] != 0 and (limit - weights[k]) / step[k] < fraction:
                fraction, blocking, bound = (limit - weights[k]) / step[k], k, limit
        weights = weights + max(fraction, 0.0) * step
        if blocking is not None:
            weights[blocking] = bound
            free.remove(blocking)
            continue
        slopes = vectors @ weighted_sum(weights, vectors)
        tolerances = 1e-13 * lengths * (weights @ lengths)
        entering = entering_weights(slopes, tolerances, weights, lower, upper, free)
        free.extend(entering)
        # One more pass over the final free set polishes away the error of the last long step.
        settled = 0 if entering else settled + 1
        if settled == 2:
            break
    gap = optimality_gap(vectors, weights, lower, upper)
    if gap > 1e-10 or abs(weights.sum() - 1) > 1e-9:
        raise ArithmeticError(f"min-norm weights are not optimal: gap {gap:.1e}, sum {weights.sum()!r}")
    return weights


def min_norm_simplex(vectors):
    """Weights of the shortest vector in the convex hull (Desideri 2012; FedLF appendix eq. 3)."""
    return min_norm_box(vectors, np.zeros(len(vectors)), np.ones(len(vectors)))


def fedmgda_plus(updates, epsilon, reference, past=None):
    """FedMGDA+ (Hu et al. 2022, Algorithm 1): shortest sum of unit updates, weights near a reference."""
    rows = list(updates) + ([] if past is None else list(past))
    reference = list(reference) + [0.0] * (len(rows) - len(reference))
    kept = [k for k, row in enumerate(rows) if np.linalg.norm(row) > 0]
    if not kept:
        return np.zeros(updates.shape[1])
    units = np.array([rows[k] / np.linalg.norm(rows[k]) for k in kept])
    centre = np.array([reference[k] for k in kept])
    if centre.sum() > 0:
        centre = centre / centre.sum()
    else:  # everyone with a reference weight sent nothing
        present = np.array([k < len(updates) for k in kept])
        centre = normalised(present if present.any() else np.ones(len(kept)))
    weights = min_norm_box(units, np.maximum(0, centre - epsilon), np.minimum(1, centre + epsilon))
    return weighted_sum(weights, units)


# Conflict removal


def projection_order(losses, order):
    """Row numbers in the order in which they serve as projection targets (FedFV Algorithm 1, line 5)."""
    ascending = [int(k) for k in np.argsort(losses, kind="stable")]
    if isinstance(order, str):
        return {"loss": ascending, "reverse": ascending[::-1]}[order]
    return [int(k) for k in order]


def number_of(share):
    """Smallest whole number of clients that covers a share, e.g. 3 for 0.3 * 10 in spite of rounding."""
    return int(np.ceil(np.round(share, 9)))


def without_conflict(vector, target):
    """The vector, projected onto the target's normal plane if they conflict (FedFV Algorithm 2 lines 5-7)."""
    if vector @ target < 0 and np.linalg.norm(target) > 0:
        return vector - (target @ vector) / (target @ target) * target
    return vector


def fedfv(updates, losses, clients, round, state, alpha, tau, order="loss"):
    """FedFV (Wang et al. 2021, Algorithms 1-3), in the reading of the authors' first release."""
    number = len(updates)
    targets = projection_order(losses, order)
    kept = number - number_of((number - 1) * (1 - alpha)) if alpha > 0 else 0
    keeps_gradient = set(targets[number - kept :])

    projected = []
    for k in range(number):
        gradient = updates[k]
        if k not in keeps_gradient:
            for j in targets:
                if j != k:
                    gradient = without_conflict(gradient, updates[j])
        projected.append(gradient)
    update = np.mean(projected, axis=0)

    memory = {} if state is None else state["memory"]
    if tau > 0 and round >= tau:
        records = recall(memory, clients, round, f"last:{tau}")
        for age in range(tau, 0, -1):
            conflicting = np.zeros_like(update)
            for record in records:
                if record["age"] == age and update @ record["update"] < 0:
                    conflicting = conflicting + record["update"]
            update = without_conflict(update, conflicting)

    length = np.linalg.norm(np.mean(updates, axis=0))
    update = rescale(update, length, norms_of(updates).sum() / number)
    return update, {"memory": remember(memory, updates, losses, clients, round)}


def mfairfl_conflicts(updates, losses, clients, state, beta, delta, order="loss"):
    """mFairFL (Su et al. 2024, Algorithm 1 lines 10-12 and Algorithm 2): conflicts against moving goals."""
    number = len(updates)
    averages = {} if state is None else dict(state)
    targets = projection_order(losses, order)
    adjusted = [np.array(update) for update in updates]
    for k in targets[: number_of(beta * number)]:
        summed_lengths = np.linalg.norm(updates[k])
        for i in targets:
            # No cosine exists with a zero vector, or with the rounding left of a cancelled one.
            if i == k or np.linalg.norm(updates[i]) == 0 or vanished(adjusted[k], summed_lengths):
                continue
            own_length, target_length = np.linalg.norm(adjusted[k]), np.linalg.norm(updates[i])
            cosine = np.clip(adjusted[k] @ updates[i] / (own_length * target_length), -1, 1)
            average = averages.get((clients[k], clients[i]), 0.0)
            goal = np.clip(average, 0, LARGEST_COSINE_GOAL)
            if cosine < goal:
                change = own_length * (cosine * np.sqrt(1 - goal**2) - goal * np.sqrt(1 - cosine**2))
                change = change / (target_length * np.sqrt(1 - goal**2)) * updates[i]
                adjusted[k] = adjusted[k] - change
                summed_lengths += np.linalg.norm(change)
            averages[(clients[k], clients[i])] = float(delta * average + (1 - delta) * cosine)
    update = np.mean(adjusted, axis=0)
    length = np.linalg.norm(np.mean(updates, axis=0))
    return rescale(update, length, norms_of(updates).sum() / number), averages


# Common descent directions with a fairness objective


def all_equal(losses):
    """Whether the losses are all the same (all zero included), so that nothing can be made more even."""
    return all(loss == losses[0] for loss in losses)


def fedmdfg_force(losses, clients, expected):
    """Whether some but not all clients do worse than expected (FedMDFG), and the expectations afterwards."""
    exceeding = [
        client in expected and loss > expected[client]["loss"] for client, loss in zip(clients, losses, strict=True)
    ]
    after = dict(expected)
    for client, loss in zip(clients, losses, strict=True):
        if client not in expected:
            after[client] = {"loss": float(loss), "joins": 1}
        else:
            before, joins = expected[client]["loss"], expected[client]["joins"] + 1
            mean = before + (loss - before) / joins if loss <= before else before
            after[client] = {"loss": float(mean), "joins": joins}
    return any(exceeding) and not all(exceeding), after


def fedmdfg(updates, losses, clients, round, state, theta_degrees, absent="last:1"):
    """FedMDFG (Pan et al. 2023, Algorithm 1), the direction only: no line search."""
    state = {"memory": {}, "expected": {}} if state is None else state
    force_active, expected = fedmdfg_force(losses, clients, state["expected"])
    records = recall(state["memory"], clients, round, absent)
    state = {"memory": remember(state["memory"], updates, losses, clients, round), "expected": expected}

    kept = [k for k in range(len(updates)) if np.linalg.norm(updates[k]) > 0]
    if not kept:
        return np.zeros(updates.shape[1]), state
    mean_length = np.mean([np.linalg.norm(updates[k]) for k in kept])
    present = np.array([rescale(updates[k], mean_length) for k in kept])
    losses = np.array([losses[k] for k in kept], dtype=float)
    rows = list(present)

    if not all_equal(losses):
        guidance = np.ones(len(losses)) / np.sqrt(len(losses))
        unit_losses = losses / np.linalg.norm(losses)
        angle = np.degrees(np.arccos(np.clip(unit_losses @ guidance, -1, 1)))
        if angle > theta_degrees or force_active:
            fair_weights = (guidance @ unit_losses) * unit_losses - guidance
            fair_weights = fair_weights / np.linalg.norm(fair_weights)
            fair = weighted_sum(fair_weights, present)
            if not vanished(fair, np.abs(fair_weights) @ norms_of(present)):
                rows.append(fair)

    rows += [rescale(r["update"], mean_length) for r in records if np.linalg.norm(r["update"]) > 0]
    rows = np.array(rows)
    weights = min_norm_simplex(rows)
    length = np.linalg.norm(np.mean(present, axis=0))
    return rescale(weighted_sum(weights, rows), length, weights @ norms_of(rows)), state


def fedlf_fair_weights(losses):
    """Weights q of the clients' gradients in the gradient of -cos(1, F) (FedLF appendix eq. 7)."""
    losses = np.asarray(losses, dtype=float)
    ones, length = np.ones(len(losses)), np.linalg.norm(losses)
    ones_length = np.linalg.norm(ones)
    return (losses @ ones * losses / (ones_length * length**2) - ones / ones_length) / length


def fedlf_group(present, past, losses, normalise, fair):
    """Direction of one layer (FedLF appendix eqs. 3 and 8), zero if it counts as Pareto stationary there."""
    zero = np.zeros(present.shape[1])
    mean_length = norms_of(present).mean()
    if normalise:
        present = np.array([rescale(row, mean_length) for row in present])
        past = [rescale(row, mean_length) for row in past]
    rows = [row for row in [*present, *past] if np.linalg.norm(row) > 0]
    if fair and not all_equal(losses):
        fair_weights = fedlf_fair_weights(losses)
        fair_row = weighted_sum(fair_weights, present)
        if not vanished(fair_row, np.abs(fair_weights) @ norms_of(present)):
            rows.append(rescale(fair_row, mean_length) if normalise else fair_row)
    if not rows:
        return zero
    rows = np.array(rows)
    direction = weighted_sum(min_norm_simplex(rows), rows)
    return zero if direction @ direction <= 1e-12 * mean_length**2 else direction


def fedlf(updates, losses, clients, round, state, layers, normalise=True, fair=True, absent="expected", join=True):
    """FedLF (Pan et al. 2024, appendix A.1): a common descent direction per layer or joined layers."""
    memory = {} if state is None else state["memory"]
    past = [record["update"] for record in recall(memory, clients, round, absent)]

    def direction_of(group):
        return fedlf_group(updates[:, group], [row[group] for row in past], losses, normalise, fair)

    groups = [np.arange(start, stop) for start, stop in layers]
    directions = [direction_of(group) for group in groups]
    current = 0
    while join and current < len(groups):
        if np.any(directions[current]) or len(groups) == 1:
            current += 1
            continue
        first = current if current + 1 < len(groups) else current - 1
        groups[first : first + 2] = [np.concatenate(groups[first : first + 2])]
        directions[first : first + 2] = [direction_of(groups[first])]
        current = first

    update = np.zeros(updates.shape[1])
    for group, direction in zip(groups, directions, strict=True):
        update[group] = direction
    update = rescale(update, np.linalg.norm(np.mean(updates, axis=0)))
    return update, {"memory": remember(memory, updates, losses, clients, round)}


# Directions with a prescribed decrease per client


def unit_rows_with_targets(updates, losses, gamma, normalise):
    """Non-zero rows, with unit length if asked, and the decrease |f|^gamma each of them is to get."""
    kept = [k for k in range(len(updates)) if np.linalg.norm(updates[k]) > 0]
    rows = [rescale(updates[k], 1.0) if normalise else updates[k] for k in kept]
    return rows, [abs(float(losses[k])) ** gamma for k in kept]


def adafed(updates, losses, gamma, length="paper", normalise=False, present=None):
    """AdaFed (Hamidi and Yang 2024, Algorithm 1 lines 11-15 with eqs. 5, 6, 14) for independent updates.

    The first `present` rows (all by default) are this round's; any further rows are remembered ones.
    """
    rows, decreases = unit_rows_with_targets(updates, losses, gamma, normalise)
    if not rows:
        return np.zeros(updates.shape[1])
    orthogonal = []
    for gradient, decrease in zip(rows, decreases, strict=True):
        remainder, divisor = gradient, decrease
        summed_lengths = np.linalg.norm(gradient)
        for earlier in orthogonal:
            ratio = (gradient @ earlier) / (earlier @ earlier)
            remainder = remainder - ratio * earlier
            divisor = divisor - ratio
            summed_lengths += np.linalg.norm(ratio * earlier)
        if vanished(remainder, summed_lengths) or divisor == 0:
            raise ValueError("AdaFed's orthogonalisation needs independent updates and non-zero divisors")
        orthogonal.append(remainder / divisor)
    inverses = np.array([1 / (row @ row) for row in orthogonal])
    weights = inverses / inverses.sum()
    direction = weighted_sum(weights, np.array(orthogonal))
    if length == "paper":
        return direction
    if length != "mean":
        raise ValueError(f"unknown length {length!r}: use 'paper' or 'mean'")
    return rescale(direction, np.linalg.norm(np.mean(updates[:present], axis=0)), weights @ norms_of(orthogonal))


def even(
    updates, losses, gamma, ridge, present=None, least=1e-3, blur=1.0, layers=None, level=False, recall=1.0, caution=0.0
):
    """even: per layer the shortest d with u_k . d >= b_k, shortfalls s_k paid for by |s|^2 / ridge.

    Of the absent ones' b_k counts the share `recall`, a number or one for each layer. The step is |m| cos^caution long,
    of its angle with the mean m.

    With z = (d, s / sqrt(ridge)) it is the shortest z with [u_k, sqrt(ridge) e_k] z >= b_k: least distance
    programming, which Lawson and Hanson (chapter 23) turn into one non-negative least squares problem. It lies along
    the nearest point of a hull, whose length counts, times the mean length of the layer's parts; the whole is as long
    as the present clients' mean.
    """
    if max(losses) == 0:
        return np.zeros(updates.shape[1])
    present, whole, start = present or len(updates), [], 0
    layers = layers or [updates.shape[1]]
    for size, share in zip(layers, np.broadcast_to(recall, len(layers)), strict=True):
        parts, start = updates[:, start : start + size], start + size
        shares = np.where(np.arange(len(updates)) < present, 1.0, share)
        asked = np.maximum(shares * (np.asarray(losses) / max(losses)) ** gamma, least)
        whole.append(_even_layer(parts, np.asarray(losses), asked, ridge, present, blur, level))
    direction, mean = np.concatenate(whole), np.mean(updates[:present], axis=0)
    length, own = np.linalg.norm(mean), np.linalg.norm(direction)
    cosine = direction @ mean / (own * length) if own > 0 and length > 0 else 1.0
    return rescale(direction, length * min(max(cosine, least), 1.0) ** caution, 0.0)


def even_recall(last, updates, layers, known=None, horizon=100):
    """even's recall="learnt": by layer the squared mean cosine of updates and their clients' last ones (None: new).

    Returns the shares, 1 before anybody came back, and what is known after this round: the mean and of how many.
    """
    again = [(new, old) for new, old in zip(updates, last, strict=True) if old is not None]
    if again:
        edges = np.cumsum([0, *layers])
        cosines = [
            np.mean([new[a:b] @ old[a:b] / np.linalg.norm(new[a:b]) / np.linalg.norm(old[a:b]) for new, old in again])
            for a, b in itertools.pairwise(edges)
        ]
        mean, heard = known or (np.zeros(len(layers)), 0)
        heard = min(heard + len(again), horizon)
        share = min(1.0, len(again) / heard)
        known = ((1 - share) * mean + share * np.array(cosines), heard)
    return (1.0 if known is None else np.maximum(known[0], 0.0) ** 2), known


def _even_layer(parts, losses, asked, ridge, present, blur, level):
    rows = [k for k in range(len(parts)) if np.linalg.norm(parts[k]) > 0]
    if not rows:
        return np.zeros(parts.shape[1])
    lengths = np.linalg.norm(parts, axis=1)
    units = [parts[k] / lengths[k] for k in rows]
    asked = list(asked[rows])
    if level and np.ptp(losses[:present]) > 0:
        cosine = losses[:present].sum() / np.sqrt(present) / np.linalg.norm(losses[:present])
        slopes = cosine * losses[:present] / np.linalg.norm(losses[:present]) - 1 / np.sqrt(present)
        pull = sum(slopes[k] * parts[k] / lengths[k] for k in rows if k < present)
        if np.linalg.norm(pull) > 1e-9 * np.abs(slopes).sum():
            units, asked = [*units, pull / np.linalg.norm(pull)], [*asked, 1.0]
    extended = np.hstack([units, np.sqrt(ridge) * np.eye(len(units))])
    system = np.vstack([extended.T, asked])
    goal = np.append(np.zeros(extended.shape[1]), 1.0)
    weights, _ = scipy.optimize.nnls(system, goal, maxiter=300 * len(units))
    residual = system @ weights - goal
    shortest = -residual[:-1] / residual[-1]
    summed = blur * weights.sum() / abs(residual[-1])  # blur: how much sooner a direction counts as vanished
    if vanished(shortest[: parts.shape[1]], summed):
        return np.zeros(parts.shape[1])
    nearest = shortest / (shortest @ shortest)  # of the hull of [u_k, sqrt(ridge) e_k] / b_k, to the origin
    return lengths[:present].mean() * nearest[: parts.shape[1]]


# Weights from accuracies, counts and fairness


def fedfa_weights(accuracies, participations, alpha, beta, constant=1e-12):
    """FedFa (Huang et al. 2020, eqs. 9-15): weights from the information in accuracy and participation."""
    number = len(accuracies)
    if number == 1:
        return np.ones(1)

    def information(share):
        return -np.log2(share if share != 0 else constant)

    if sum(accuracies) == 0:
        accuracy_part = np.full(number, 1 / number)
    else:
        accuracy_information = [information(accuracy / sum(accuracies)) for accuracy in accuracies]
        accuracy_part = np.array(accuracy_information) / sum(accuracy_information)
    frequency_information = [information(1 - count / sum(participations)) for count in participations]
    frequency_part = np.array(frequency_information) / sum(frequency_information)
    return alpha * accuracy_part + beta * frequency_part


def fedfa(updates, accuracies, clients, round, state, alpha, beta, gamma, lr, every=1):
    """FedFa (Huang et al. 2020, Algorithm 2 with eq. 7): information weights, server momentum as printed."""
    if state is None:
        state = {"participations": {}, "momentum": np.zeros(updates.shape[1])}
    participations = dict(state["participations"])
    for client in clients:
        participations[client] = participations.get(client, 0) + 1
    weights = fedfa_weights(accuracies, [participations[client] for client in clients], alpha, beta)

    # Models are counted from this round's global model, so that theta_k is minus the client's update.
    global_model = np.zeros(updates.shape[1])
    aggregated = weighted_sum(weights, global_model - updates)
    momentum = gamma * state["momentum"] + (1 - gamma) * (aggregated - global_model)
    new_model = aggregated - lr * momentum if (round + 1) % every == 0 else aggregated
    return global_model - new_model, {"participations": participations, "momentum": momentum}


def fairfed(updates, sizes, fairness, fairness_global, accuracies, accuracy_global, clients, state, beta):
    """FairFed (Ezzeldin et al. 2023, Algorithm 1): weights fall with the distance from global fairness."""
    weights = {} if state is None else dict(state["weights"])
    gaps = []
    for k, client in enumerate(clients):
        weights.setdefault(client, sizes[k] / sum(sizes))
        if np.isnan(fairness[k]):
            gaps.append(abs(accuracies[k] - accuracy_global))
        else:
            gaps.append(abs(fairness_global - fairness[k]))
    for client, gap in zip(clients, gaps, strict=True):
        weights[client] = float(max(0.0, weights[client] - beta * (gap - np.mean(gaps))))
    update = weighted_sum(normalised([weights[client] for client in clients]), updates)
    return update, {"weights": weights}


# What FedLF's public code makes of other papers' methods


def afl_by_place(updates, losses, weights, step):
    """AFL whose weights belong to places in the cohort: (update, new weights)."""
    weights = np.full(len(updates), 1 / len(updates)) if weights is None else weights
    return weights @ updates, np.asarray(project_to_simplex(list(weights + step * np.asarray(losses))))


def fedfv_late_window(updates, losses, clients, round, state, alpha, tau):
    """FedFV whose window is the rounds t - tau + 1 ... t, the present clients included."""
    history = {} if state is None else dict(state)
    count = len(updates)
    order = np.argsort(losses, kind="stable")
    kept = set(order[int(np.ceil((count - 1) * (1 - alpha))) :].tolist()) if alpha > 0 else set()
    projected = []
    for i in range(count):
        own = updates[i].copy()
        for j in order:
            if i not in kept and j != i and updates[j] @ own < 0:
                own = own - (updates[j] @ own) / (updates[j] @ updates[j]) * updates[j]
        projected.append(own)
    total = np.mean(projected, axis=0)
    history.update({client: (round, update) for client, update in zip(clients, updates, strict=True)})
    if round + 1 >= tau:
        for back in range(tau - 1, -1, -1):
            seen = [g for last, g in history.values() if last == round - back and g @ total < 0]
            if seen and total @ sum(seen) < 0:
                against = sum(seen)
                total = total - (total @ against) / (against @ against) * against
    return total / np.linalg.norm(total) * np.linalg.norm(updates.mean(axis=0)), history


def fedfa_inverted(updates, accuracies, clients, round, state, alpha, beta, gamma):
    """FedFa with raw accuracies (in percent) and frequencies over sums of information, and heavy-ball momentum."""
    state = {"counts": {}, "ball": np.zeros(updates.shape[1])} if state is None else state
    counts = dict(state["counts"])
    for client in clients:
        counts[client] = counts.get(client, 0) + 1
    shares = np.array([counts[client] for client in clients]) / (round + 1)
    percent = 100 * np.asarray(accuracies)
    of_accuracy = -np.log2(percent / percent.sum() + 1e-6).sum()
    of_frequency = -np.log2(1 - shares / shares.sum() + 1e-6).sum()
    weights = alpha * percent / of_accuracy + beta * shares / of_frequency
    ball = gamma * state["ball"] + (weights / weights.sum()) @ updates
    return ball, {"counts": counts, "ball": ball}


# Server steps on a combined update


def server_momentum(u, state, beta, lr):
    """FedAvgM (Hsu et al. 2019): v = beta v + u, update lr v."""
    velocity = beta * (np.zeros_like(u) if state is None else state["velocity"]) + u
    return lr * velocity, {"velocity": velocity}


def fedopt(u, state, lr, beta1, tau, second_moment, correction):
    """FedOpt (Reddi et al. 2021, Algorithm 2) with Delta = -u, v_0 = 0 and a step-size correction."""
    if state is None:
        state = {"first": np.zeros_like(u), "second": np.zeros_like(u), "steps": 0}
    change = -u
    steps = state["steps"] + 1
    first = beta1 * state["first"] + (1 - beta1) * change
    second = second_moment(state["second"], change**2)
    model_change = lr * correction(steps) * first / (np.sqrt(second) + tau)
    return -model_change, {"first": first, "second": second, "steps": steps}


def adam_correction(beta1, beta2, bias_correction):
    """Adam's bias correction as a factor on the learning rate (Kingma and Ba 2015, section 2), or 1."""
    if not bias_correction:
        return lambda steps: 1.0
    return lambda steps: np.sqrt(1 - beta2**steps) / (1 - beta1**steps)


def fedadam(u, state, lr, beta1, beta2, tau, bias_correction=False):
    """FedAdam (Reddi et al. 2021, Algorithm 2): v = beta2 v + (1 - beta2) Delta^2."""

    def second_moment(second, square):
        return beta2 * second + (1 - beta2) * square

    return fedopt(u, state, lr, beta1, tau, second_moment, adam_correction(beta1, beta2, bias_correction))


def fedyogi(u, state, lr, beta1, beta2, tau, bias_correction=False):
    """FedYogi (Reddi et al. 2021, Algorithm 2): v = v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    def second_moment(second, square):
        return second - (1 - beta2) * square * np.sign(second - square)

    return fedopt(u, state, lr, beta1, tau, second_moment, adam_correction(beta1, beta2, bias_correction))


def fedamsgrad(u, state, lr, beta1, beta2, tau):
    """FedAMSGrad (Tong et al. 2020): FedAdam with the largest second moment so far in the denominator."""
    if state is None:
        state = {"first": np.zeros_like(u), "second": np.zeros_like(u), "largest": np.zeros_like(u)}
    first = beta1 * state["first"] + (1 - beta1) * -u
    second = beta2 * state["second"] + (1 - beta2) * u**2
    largest = np.maximum(state["largest"], second)
    return -lr * first / (np.sqrt(largest) + tau), {"first": first, "second": second, "largest": largest}


def fedadagrad(u, state, lr, tau, beta1=0.0):
    """FedAdagrad (Reddi et al. 2021, Algorithm 2): v = v + Delta^2."""

    def second_moment(second, square):
        return second + square

    return fedopt(u, state, lr, beta1, tau, second_moment, lambda steps: 1.0)


# Group methods: whole rounds of one full-batch gradient step a client, by autograd in float64
#
# A client is a dictionary: inputs, labels (torch) and groups, one mask a group. `scores(model, inputs)`: the network.


def deviations(kind, probabilities, losses, labels, groups):
    """mFairFL eqs. 2 to 6: F(D) - F(D^s) for each label, group and class; None where nobody is to be compared.

    Of two classes the second stands for both. "loss" is eq. 5 as typed: the groups' mean losses.
    """
    classes = probabilities.shape[1]
    outcomes = [1] if classes == 2 else range(classes)
    everybody = torch.ones(len(labels), dtype=torch.bool)
    columns = [probabilities[:, c] for c in outcomes]
    if kind == "dp":
        questions = [(everybody, columns)]
    elif kind == "eodds":
        questions = [(labels == y, columns) for y in range(classes)]
    elif kind == "eopp":
        questions = [(labels == y, [probabilities[:, y]]) for y in outcomes]
    elif kind == "ap":
        questions = [(everybody, [probabilities[torch.arange(len(labels)), labels]])]
    else:
        questions = [(everybody, [losses])]
    found = []
    for among, values in questions:
        for group in groups:
            for value in values:
                somebody = bool((among & group).any())
                found.append(value[among].mean() - value[among & group].mean() if somebody else None)
    return found


def constrained_gradients(
    models, clients, scores, shares, multipliers, kinds, alpha, gamma, damping=0.0, form="absolute", sharpness=1.0
):
    """mFairFL eqs. 10 to 12 (FPFL with damping): the multipliers' step, then each client's part of J's gradient.

    J = L + sum_j lambda_j h_j, h_j = |d_j| - alpha, over the data of all given clients; "two-sided" has d_j - alpha and
    -d_j - alpha instead. Every client has a copy of the model of its own, so that autograd tells whose samples push
    where; its part of the constraints is divided by its share, so that the mean by shares is J's gradient.
    """
    own = [torch.tensor(model, requires_grad=True) for model in models]
    said = [scores(model, client["inputs"]) for model, client in zip(own, clients, strict=True)]
    labels = torch.cat([client["labels"] for client in clients])
    groups = [torch.cat(masks) for masks in zip(*(client["groups"] for client in clients), strict=True)]
    probabilities = torch.softmax(sharpness * torch.cat(said), dim=1)
    losses = torch.nn.functional.cross_entropy(torch.cat(said), labels, reduction="none")
    risks = [part.mean() for part in losses.split([len(client["labels"]) for client in clients])]

    penalty, after = torch.zeros(()), []
    gaps = [gap for kind in kinds for gap in deviations(kind, probabilities, losses, labels, groups)]
    for number, gap in enumerate(gaps):
        if gap is None:
            after.append([0.0, 0.0] if multipliers is None else multipliers[number])
            continue
        held = []
        for place, side in enumerate([abs(gap)] if form == "absolute" else [gap, -gap]):
            violation = side.item() - alpha
            before = 0.0 if multipliers is None else multipliers[number][place]
            held.append(max(0.0, before + gamma * violation))
            penalty = penalty + max(0.0, held[-1] + damping * violation) * side
        after.append(held)

    parts = torch.autograd.grad(penalty, own, retain_graph=True) if penalty.requires_grad else [0.0] * len(own)
    risk_parts = torch.autograd.grad(sum(risks), own)
    gradients = [(risk + part / share).numpy() for risk, part, share in zip(risk_parts, parts, shares, strict=True)]
    return np.array(gradients), [risk.item() for risk in risks], after


def merged(clients):
    """All clients' data as one client's."""
    return {
        "inputs": torch.cat([client["inputs"] for client in clients]),
        "labels": torch.cat([client["labels"] for client in clients]),
        "groups": [torch.cat(masks) for masks in zip(*(client["groups"] for client in clients), strict=True)],
    }


def sizes_of(clients):
    return np.array([len(client["labels"]) for client in clients], dtype=float)


def mfairfl(model, clients, scores, rounds, lr, beta=1.0, delta=0.01, **constraint):
    """mFairFL (Su et al. 2024, Algorithms 1 and 2): the server's multipliers, then the clients' conflicts."""
    multipliers, goals, number = None, None, len(clients)
    for _ in range(rounds):
        gradients, risks, multipliers = constrained_gradients(
            [model] * number, clients, scores, [1 / number] * number, multipliers, **constraint
        )
        update, goals = mfairfl_conflicts(lr * gradients, risks, range(number), goals, beta, delta)
        model = model - update
    return model


def fpfl(model, clients, scores, rounds, lr, **constraint):
    """FPFL (Rodriguez-Galvez et al. 2021) without its noise: the same, averaged by size."""
    multipliers, shares = None, normalised(sizes_of(clients))
    for _ in range(rounds):
        gradients, _, multipliers = constrained_gradients(
            [model] * len(clients), clients, scores, shares, multipliers, **constraint
        )
        model = model - lr * fedavg(gradients, shares)
    return model


def indfair(model, clients, scores, rounds, lr, **constraint):
    """IndFair (mFairFL eq. 7): every client by itself; one model a client."""
    models, multipliers = [model] * len(clients), [None] * len(clients)
    for _ in range(rounds):
        for k, client in enumerate(clients):
            (gradient,), _, multipliers[k] = constrained_gradients(
                [models[k]], [client], scores, [1.0], multipliers[k], **constraint
            )
            models[k] = models[k] - lr * gradient
    return np.array(models)


def fedavg_f(model, clients, scores, rounds, lr, **constraint):
    """FedAvg-f (mFairFL's baseline): every client its own constraints and multipliers, FedAvg of the models."""
    multipliers = [None] * len(clients)
    for _ in range(rounds):
        updates = []
        for k, client in enumerate(clients):
            (gradient,), _, multipliers[k] = constrained_gradients(
                [model], [client], scores, [1.0], multipliers[k], **constraint
            )
            updates.append(lr * gradient)
        model = model - fedavg(np.array(updates), sizes_of(clients))
    return model


def weighted_gradient(model, client, scores, weights):
    """Gradient of sum_i weights_i l_i."""
    own = torch.tensor(model, requires_grad=True)
    losses = torch.nn.functional.cross_entropy(scores(own, client["inputs"]), client["labels"], reduction="none")
    return torch.autograd.grad((torch.as_tensor(weights) * losses).sum(), own)[0].numpy()


def fedfb(model, clients, scores, rounds, lr, step):
    """FedFB (Zeng et al. 2021) for demographic parity: lambda_yz / n_z a sample, clients count by n_c = their sum.

    The summed loss is put on the scale of a client's mean, n / n_k times it; each group is clipped at its own size.
    """
    everyone = merged(clients)
    total, zs = len(everyone["labels"]), range(len(everyone["groups"]))
    cells = [[(group & (everyone["labels"] == y)) for group in everyone["groups"]] for y in (0, 1)]
    counts = [[int(cells[y][z].sum()) for z in zs] for y in (0, 1)]
    n = [counts[0][z] + counts[1][z] for z in zs]
    lam = [[n[z] / total for z in zs] for y in (0, 1)]
    for r in range(rounds):
        updates, n_c = [], []
        for client in clients:
            weights = np.zeros(len(client["labels"]))
            for i, y in enumerate(client["labels"].tolist()):
                z = next(z for z in zs if client["groups"][z][i])
                weights[i] = lam[y][z] / n[z]
            gradient = weighted_gradient(model, client, scores, weights)
            updates.append(lr * total / len(weights) * gradient)
            n_c.append(weights.sum())
        model = model - fedavg(np.array(updates), np.array(n_c))

        said = scores(torch.tensor(model), everyone["inputs"])
        losses = torch.nn.functional.cross_entropy(said, everyone["labels"], reduction="none")
        summed = [[float(losses[cells[y][z]].sum()) for z in zs] for y in (0, 1)]
        for z in zs[1:]:
            f = -summed[0][0] / n[0] + summed[1][0] / n[0] + summed[0][z] / n[z] - summed[1][z] / n[z]
            f += counts[0][0] / n[0] - counts[0][z] / n[z]
            lam[0][z] += step / np.sqrt(r + 1) * f
            lam[0][0] -= step / np.sqrt(r + 1) * f
        for z in zs:
            lam[0][z] = min(max(lam[0][z], 0.0), 2 * n[z] / total)
            lam[1][z] = 2 * n[z] / total - lam[0][z]
    return model


def reweighed(client):
    """Kamiran and Calders 2012: every sample weighs P(group) P(label) / P(group, label), counted in its own data."""
    labels, total = client["labels"].tolist(), len(client["labels"])
    joint = [tuple(bool(group[i]) for group in client["groups"]) for i in range(total)]
    pairs = list(zip(joint, labels, strict=True))
    return np.array([joint.count(z) * labels.count(y) / (total * pairs.count((z, y))) for z, y in pairs])


def opportunity(client, predicted):
    """FairFed eq. 3: the second group's true positive rate minus the first's."""
    rates = []
    for group in client["groups"]:
        positives = group & (client["labels"] == 1)
        rates.append(float(predicted[positives].double().mean()) if positives.any() else np.nan)
    return rates[1] - rates[0]


def fairfed_rounds(model, clients, scores, rounds, lr, beta):
    """FairFed (Ezzeldin et al. 2023, Algorithm 1) with local reweighting."""
    state, everyone, sizes = None, merged(clients), sizes_of(clients)
    for _ in range(rounds):
        predicted = [scores(torch.tensor(model), client["inputs"]).argmax(1) for client in clients]
        fairness = [opportunity(client, said) for client, said in zip(clients, predicted, strict=True)]
        right = [(said == client["labels"]).double() for client, said in zip(clients, predicted, strict=True)]
        updates = [
            lr * weighted_gradient(model, client, scores, reweighed(client) / len(client["labels"]))
            for client in clients
        ]
        update, state = fairfed(
            np.array(updates),
            sizes,
            fairness,
            opportunity(everyone, torch.cat(predicted)),
            [float(one.mean()) for one in right],
            float(torch.cat(right).mean()),
            range(len(clients)),
            state,
            beta,
        )
        model = model - update
    return model


def fpfl_followed(model, clients, scores, rounds, lr, steps, kinds, alpha, gamma, damping, form, sharpness):
    """FPFL with several full-batch steps a round, each client following the gaps through its own steps.

    A client takes it that the mean probabilities of every cell (groups and label) that it has moved for everyone as
    they did for itself, as it saw them at its step before.
    """
    shares, multipliers = normalised(sizes_of(clients)), None
    labels = torch.cat([client["labels"] for client in clients])
    groups = [torch.cat(masks) for masks in zip(*(client["groups"] for client in clients), strict=True)]
    kinds_of = [(*(bool(group[i]) for group in groups), int(labels[i])) for i in range(len(labels))]
    owner = np.repeat(np.arange(len(clients)), sizes_of(clients).astype(int))

    def answers(vector, client):
        said = scores(vector, client["inputs"])
        return torch.softmax(sharpness * said, dim=1), torch.nn.functional.cross_entropy(said, client["labels"])

    def gaps_of(probabilities):
        return [gap for kind in kinds for gap in deviations(kind, probabilities, labels * 0.0, labels, groups)]

    for _ in range(rounds):
        received = [answers(torch.tensor(model), client)[0] for client in clients]
        first = gaps_of(torch.cat(received))
        held = []
        for number, gap in enumerate(first):
            sides = [abs(gap)] if form == "absolute" else [gap, -gap]
            before = [0.0] * len(sides) if multipliers is None else multipliers[number]
            held.append([max(0.0, b + gamma * (s.item() - alpha)) for b, s in zip(before, sides, strict=True)])
        multipliers, updates = held, []
        for k, client in enumerate(clients):
            own, now = torch.tensor(model), received[k]
            for _ in range(steps):
                moved = torch.cat(received).clone()
                for cell in {kinds_of[i] for i in np.flatnonzero(owner == k)}:
                    mine = torch.tensor([c == cell for c, o in zip(kinds_of, owner, strict=True) if o == k])
                    moved[torch.tensor([c == cell for c in kinds_of])] += now[mine].mean(0) - received[k][mine].mean(0)
                force = []
                for number, gap in enumerate(gaps_of(moved)):
                    up, down = held[number][0], held[number][-1]
                    pushed = [
                        max(0.0, up + damping * (gap.item() - alpha)),
                        max(0.0, down - damping * (gap.item() + alpha)),
                    ]
                    if form == "absolute":
                        pushed = [pushed[0] * (gap.item() > 0), pushed[1] * (gap.item() < 0)]
                    force.append(pushed[0] - pushed[1])
                variable = own.clone().requires_grad_()
                mine, risk = answers(variable, client)
                everyone = gaps_of(torch.cat([mine if j == k else received[j] for j in range(len(clients))]))
                loss = risk + sum(f * gap for f, gap in zip(force, everyone, strict=True)) / shares[k]
                now = mine.detach()
                own = own - lr * torch.autograd.grad(loss, variable)[0]
            updates.append(model - own.numpy())
        model = model - fedavg(np.array(updates), shares)
    return model
