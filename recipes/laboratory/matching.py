"""Figure 11 of Zhou et al. (2024): are models that share no pretraining linear once their neurons are matched?

Two ReLU networks on made-up pictures (`pictures.py`), each trained from weights of its own on one task. The hidden
neurons of the second are put in another order, which changes none of its outputs: by *weight matching* or *activation
matching* (Ainsworth et al. 2023, https://arxiv.org/abs/2209.04836). Beside them stand two fine-tunes of one pretrained
network, for as many epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from laboratory import averaging, pictures
from laboratory import thresholds as t
from laboratory.claims import Claim
from laboratory.pictures import Weights

from hf_taskvec.errors import UnsupportedError

Order = list[torch.Tensor]  # of each hidden layer: which neuron of the second network comes where
Measures = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cosine, coefficient, baseline: (layers, samples)
UNMATCHED, WEIGHTS, ACTIVATIONS, COMMON = "no matching", "weight matching", "activation matching", "common pretraining"


def check() -> None:
    """Refuse, before anything runs, if scipy is not there."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "the section `matching` assigns neurons to neurons with scipy, and scipy is not installed: "
            'pip install "scipy>=1.11", or name the other sections with --only.'
        ) from None


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    curves: dict[str, tuple[list[float], list[float]]]  # 1 − cosine and coefficient, medians, by hidden layer
    baseline: list[float]  # 1 − cosine between the two unmatched models


def run(quick: bool) -> Result:
    epochs = 3 if quick else 20
    world, generator = pictures.make_world(0, 2), torch.Generator().manual_seed(60)
    data, tests = (world.drawn(1024, generator) for _ in range(2))
    scratch = pictures.train(pictures.initial(generator, 2), data, epochs, generator, "from scratch")
    base = pictures.pretrained(world, 0, epochs)
    tuned = pictures.train(pictures.copies(base, 2), data, epochs, generator, "fine-tuning")
    first, second = pictures.one(scratch, 0), pictures.one(scratch, 1)
    shown = data[0].flatten(0, 1)
    orders = {WEIGHTS: match_weights(first, second), ACTIVATIONS: match_activations(first, second, shown)}
    models = {UNMATCHED: scratch}
    for name, order in orders.items():
        models[name] = [torch.cat(pair) for pair in zip(first, reordered(second, order), strict=True)]
    models[COMMON] = tuned
    found = {name: hidden_measures(weights, tests[0].flatten(0, 1)) for name, weights in models.items()}
    curves = {name: (_medians(1 - cosine), _medians(factor)) for name, (cosine, factor, _) in found.items()}
    return Result(_claims(found), curves, _medians(1 - found[UNMATCHED][2]))


def hidden_measures(weights: Weights, x: torch.Tensor) -> Measures:
    """Cosine, coefficient and baseline of the features half-way, in all layers but the last."""
    cosine, coefficient, baseline = (each[:-1] for each in averaging.halfway_measures(weights, x))
    return cosine, coefficient, baseline


def reordered(weights: Weights, order: Order) -> Weights:
    """The same network with its hidden neurons in another order."""
    found = [weight.clone() for weight in weights]
    for layer, places in enumerate(order):
        found[layer] = found[layer][:, places]
        found[layer + 1] = found[layer + 1][:, :, places]
    return found


def match_weights(first: Weights, second: Weights) -> Order:
    """The order in which the second network's weights have the largest inner product with the first one's.

    One layer at a time, the others held, until no layer changes; each change makes the inner product larger.
    """
    order = [torch.arange(weight.shape[1]) for weight in second[:-1]]
    changed = True
    while changed:
        changed = False
        for layer in range(len(order)):
            alone = [torch.arange(len(places)) if n == layer else places for n, places in enumerate(order)]
            other = reordered(second, alone)
            gain = first[layer][0] @ other[layer][0].T + first[layer + 1][0].T @ other[layer + 1][0]
            places = assigned(gain)
            rows = torch.arange(len(places))
            if gain[rows, places].sum() > gain[rows, order[layer]].sum() + 1e-6:
                order[layer], changed = places, True
    return order


def match_activations(first: Weights, second: Weights, x: torch.Tensor) -> Order:
    """The order in which neurons that are active on the same inputs meet: by correlation, each layer by itself."""
    found = []
    for one, other in zip(pictures.features(first, x[None])[:-1], pictures.features(second, x[None])[:-1], strict=True):
        a, b = (each[0] - each[0].mean(dim=0) for each in (one, other))
        a, b = (each / each.norm(dim=0).clamp_min(1e-12) for each in (a, b))
        found.append(assigned(a.T @ b))
    return found


def assigned(gain: torch.Tensor) -> torch.Tensor:
    """For each row the column that it gets, each column once, with the largest sum."""
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(gain.double().numpy(), maximize=True)[1])


def _medians(values: torch.Tensor) -> list[float]:
    return [float(value) for value in values.median(dim=1).values]


def _claims(found: dict[str, Measures]) -> list[Claim]:
    far = {name: _medians(1 - cosine) for name, (cosine, _, _) in found.items()}

    def all_layers(small: Sequence[float], large: Sequence[float]) -> bool:
        return all(a < b for a, b in zip(small, large, strict=True))

    matched = (WEIGHTS, ACTIVATIONS)
    return [
        Claim(
            averaging.PAPER,
            "matching the neurons of models from scratch brings them nearer to linear",
            "figure 11",
            "1 − cosine lower than without matching in every hidden layer, by both ways",
            f"worst layer {max(far[UNMATCHED]):.1e}; {WEIGHTS} {max(far[WEIGHTS]):.1e}, "
            f"{ACTIVATIONS} {max(far[ACTIVATIONS]):.1e}",
            all(all_layers(far[name], far[UNMATCHED]) for name in matched),
        ),
        Claim(
            averaging.PAPER,
            "… but not as near as a common pretraining does",
            "figure 11",
            "1 − cosine above that of fine-tunes in every hidden layer, by both ways",
            f"worst layer {max(far[COMMON]):.1e}",
            all(all_layers(far[COMMON], far[name]) for name in matched),
        ),
        Claim(
            averaging.PAPER,
            "matched or not, they are not linear; fine-tunes of one pretrained model are",
            "figure 11",
            f"1 − cosine at most a quarter of its baseline and coefficient 1 ± {t.NEAR_ONE} in every hidden layer, "
            "for the fine-tunes alone",
            "; ".join(f"{name}: {averaging.described(measures)}" for name, measures in found.items()),
            averaging.linear(found[COMMON]) and not any(averaging.linear(found[n]) for n in (UNMATCHED, *matched)),
        ),
    ]
