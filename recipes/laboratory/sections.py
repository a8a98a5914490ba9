"""The sections of the recipe: what each measures, and its figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laboratory import (
    averaging,
    bounds,
    decay,
    digits,
    figure3,
    figures,
    gradients,
    lemmas,
    linearity,
    matching,
    proofs,
    rounds,
    stationary,
    task_figures,
    trajectories,
    transformer,
)


@dataclass(frozen=True)
class Section:
    """One part of the report: `run(quick)` gives a result with `claims`, and each figure is drawn from it."""

    about: str
    run: Callable[[bool], Any]
    figures: Mapping[str, Callable[[Any], Any]]
    sources: tuple[str, ...]  # the modules that its numbers depend on
    check: Callable[[], None] = lambda: None  # says what is missing before anything runs


SECTIONS = {
    "transformer": Section(
        "Li et al. 2025: Theorems 1 to 3 and corollaries on the one-layer transformer, in two settings",
        transformer.run,
        {"one_layer": figures.transformer_figure, "transfer": figures.transfer_figure},
        ("transformer", "one_layer"),
    ),
    "lemmas": Section(
        "Li et al. 2025: Lemma 1's conditions, corollary 2 over B, ξ and M, 2^c classes",
        lemmas.run,
        {"corollary2": figures.lemmas_figure},
        ("lemmas", "one_layer"),
    ),
    "digits": Section(
        "Li et al. 2025: coloured digits with a tiny ViT, Tables 1, 2 and figures 1, 2 (needs scikit-learn)",
        digits.run,
        {"digits": task_figures.digits_figure, "digits_transfer": task_figures.digits_transfer_figure},
        ("digits",),
        digits.check,
    ),
    "gradients": Section(
        "Zhou et al. 2025: one epoch of gradient descent makes task arithmetic exact; later the gap is −αη²C; Lemma 1",
        gradients.run,
        {"gap": figures.gradients_figure},
        ("gradients",),
    ),
    "bounds": Section(
        "Zhou et al. 2025: Theorem 2's bounds of ‖C‖ at several sizes of weights, tanh and ReLU",
        bounds.run,
        {"bounds": figures.bounds_figure},
        ("bounds", "gradients"),
    ),
    "trajectories": Section(
        "Zhou et al. 2025: one epoch against all, gradients by epoch, where merged models go (figures 2 to 4)",
        trajectories.run,
        {"epochs": task_figures.epochs_figure, "paths": task_figures.paths_figure},
        ("trajectories", "pictures"),
    ),
    "linearity": Section(
        "Zhou et al. 2024: features interpolate between models with a common pretraining",
        linearity.run,
        {"linearity": figures.linearity_figure},
        ("linearity",),
    ),
    "averaging": Section(
        "Zhou et al. 2024: averages and ensembles, stitching, random pretraining, Theorem 1 (figures 4, 9, 10, 12)",
        averaging.run,
        {"averaging": task_figures.averaging_figure},
        ("averaging", "pictures"),
    ),
    "matching": Section(
        "Zhou et al. 2024: models from scratch with matched neurons (figure 11; needs scipy)",
        matching.run,
        {"matching": task_figures.matching_figure},
        ("matching", "averaging", "pictures"),
        matching.check,
    ),
    "rounds": Section(
        "MIMA: rounds of tuning and averaging, Tables 1 to 3, figures 4 to 7 and 11, Proposition 1",
        rounds.run,
        {"rounds": task_figures.rounds_figure, "rounds_landscape": task_figures.rounds_landscape_figure},
        ("rounds", "pictures"),
    ),
    "decay": Section(
        "Kuzborskij and Abbasi Yadkori 2025: weight decay, stable rank, and summing networks",
        decay.run,
        {"weight_decay": figures.decay_figure},
        ("decay",),
    ),
    "figure3": Section(
        "Kuzborskij and Abbasi Yadkori 2025: figure 3 at its network's size",
        figure3.run,
        {"figure3": figures.figure3_figure},
        ("figure3", "decay"),
    ),
    "stationary": Section(
        "Kuzborskij and Abbasi Yadkori 2025: Lemmas 1 to 4 and 8, Theorems 1 to 3, at the end of training",
        stationary.run,
        {"stationary": figures.stationary_figure},
        ("stationary", "decay"),
    ),
    "proofs": Section(
        "Kuzborskij and Abbasi Yadkori 2025: what merging is proved with: the linear example, Lemmas 6, 7",
        proofs.run,
        {"proofs": figures.proofs_figure},
        ("proofs", "stationary", "decay"),
    ),
}
