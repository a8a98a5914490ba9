"""What counts as holding, for every claim of the laboratory.

The papers speak of limits and hide constants (Θ, ≲, "≈", "comparable"); these are the constants that we put in
their place. They are set before the runs that are reported, in commits of their own; none is changed to make a claim
hold.
"""

# Li et al. (2025), the one-layer transformer. A hinge loss is 1 for an output of 0.
SMALL = 0.2  # a loss of Θ(ε)
SHARE = 0.5  # a loss of Θ(1): at least this share of min(1, 1 − α − λ), which the proofs give for task 2
ONE_MARGIN = 0.1  # the trained margin is 1 ± this: what the proofs normalise to
SLACK = 0.15  # f_1 ≈ 1 + λα and f_2 ≈ λ + α (eqs. 45, 46) are met to this
THETA = 2.0  # a hidden constant: √(log B / B) of corollary 2, 1/M of eq. (30)
EXPONENT = 0.15  # the exponents −1/2 of corollary 2 in B, and of α² in eq. (21) relative to it
TURNED = 0.8  # a row of ΔV points along ±μ if its cosine is at least this (Lemma 1, B) …
CONSTANT = 0.25  # … and a "constant fraction" of rows is at least this

# Li et al. (2025), coloured digits. Accuracies in points.
IRRELEVANT, RELATED = 0.3, 0.5  # |α̂| at most, at least (the paper has 0.164, 0.891, −0.849)
KEPT_POINTS = 6.0  # "good performance": at most so far below the fine-tuned model (the paper's largest is 5.65)
CHANCE = 60.0  # unlearned: an accuracy of at most this (the paper has 50.34 and 4.97)
FORGOTTEN_POINTS = 20.0  # unlearned, where chance says nothing: a drop of at least this
REGION = 0.9  # of the grid points in Theorem 3's region so many are good

# Zhou et al. (2025), task vectors and gradients.
EXACT = 1e-14  # equal, in fp64, relative to the largest weight
GAP = 0.05  # a relative error that goes to 0 with η, at the smallest η
ORDER = 0.05  # an exponent of η is the one that was promised, ± this
COMPETITIVE = 5.0  # "competitive": at most so many points of accuracy below
STAYS_ALONG = 0.8  # the cosine of epochs 2 to 5 with the first (figure 3b)

# Zhou et al. (2024), cross-task linearity.
QUARTER = 0.25  # "≪ the baseline": 1 − cosine is at most this share of its baseline, in every layer
NEAR_ONE = 0.1  # the coefficient is 1 ± this, in every layer
CORRELATED = 0.8  # a "linear correlation" (figure 4)
AGREES = 5.0  # "similar performance" of two stitched models, in points of accuracy
SELECTIVE = 2.0  # forgetting in feature space: the task loses so many times what the pretraining task loses (figure 10)

# MIMA.
ALIGNED = 0.8  # "cosine → 1": at the largest N
ORTHOGONAL = 0.2  # "near-orthogonal": the mean |cosine|
NO_GAP = 1.0  # "the gap shrinks to nearly zero", in points
NEARLY_ALL = 0.97  # the merged model's relative accuracy at the largest N (the paper has 0.998)

# Kuzborskij and Abbasi Yadkori (2025), weight decay.
KEPT = 0.1  # a merged network keeps a task if its logistic loss is at most so much (nats) above the network's own
STATIONARY = 1e-6  # ‖λθ + ∇L‖ / ‖λθ‖ at the end of training
RANK_ONE = 1e-3  # σ_2 / σ_1 of a matrix of rank one
BALANCED = 1e-3  # relative difference of the layers' norms
SAME = 1e-3  # Theorem 2's identity, relative to the activations
