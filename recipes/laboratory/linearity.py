"""Claim 3: cross-task linearity needs a common pretraining (Zhou et al. 2024). A tiny Phi on made-up languages.

A language is a random Markov chain over tokens. Two tasks are dialects: the pretraining language with some of its rows
drawn anew.
"""

import copy
from dataclasses import dataclass

import torch
from laboratory import thresholds as t
from laboratory.claims import Claim
from tqdm.auto import tqdm
from transformers import PhiConfig, PhiForCausalLM

from hf_taskvec import TaskVector
from hf_taskvec.analysis import Linearity, cross_task_linearity

PAPER = "Cross-task linearity emerges in the pretraining-finetuning paradigm (Zhou et al. 2024)"
TOKENS, LENGTH, LAYERS = 48, 32, 4


def language(generator: torch.Generator) -> torch.Tensor:
    """How likely each token is after each other: few are."""
    return (4 * torch.randn(TOKENS, TOKENS, generator=generator)).softmax(dim=1)


def dialect(chain: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    other, new = chain.clone(), language(generator)
    rows = torch.randperm(TOKENS, generator=generator)[: TOKENS // 3]
    other[rows] = new[rows]
    return other


def write(chain: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    text = torch.randint(0, TOKENS, (rows, 1), generator=generator)
    for _ in range(LENGTH - 1):
        text = torch.cat([text, torch.multinomial(chain[text[:, -1]], 1, generator=generator)], dim=1)
    return text


def make_model(seed: int) -> PhiForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return PhiForCausalLM(PhiConfig(vocab_size=TOKENS, max_position_embeddings=LENGTH, **sizes)).eval()


def train(model: PhiForCausalLM, chain: torch.Tensor, steps: int, rate: float, seed: int, what: str) -> PhiForCausalLM:
    """A trained copy."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.1)
    for _ in tqdm(range(steps), desc=what, disable=None, leave=False):
        batch = write(chain, 32, generator)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@dataclass(frozen=True)
class Result:
    claims: list[Claim]
    common: Linearity
    apart: Linearity


def run(quick: bool) -> Result:
    generator = torch.Generator().manual_seed(0)
    chain = language(generator)
    dialects = [dialect(chain, generator) for _ in range(2)]
    longer, shorter = (30, 15) if quick else (400, 150)
    base = train(make_model(0), chain, longer, 3e-3, 1, "pretraining")
    tuned = [train(base, each, shorter, 1e-3, 2, "fine-tuning") for each in dialects]
    scratch = [train(make_model(seed), each, longer, 3e-3, 3, "from scratch") for seed, each in enumerate(dialects, 10)]
    data = torch.cat([write(each, 8 if quick else 100, generator) for each in dialects])

    def measured(start: PhiForCausalLM, models: list[PhiForCausalLM]) -> Linearity:
        vectors = [TaskVector.from_finetuned(start, model, name=name) for model, name in zip(models, "ab", strict=True)]
        return cross_task_linearity(start, *vectors, data, batch_size=50, progress=False)

    # Without a common pretraining θ_0 is arbitrary: an interpolation is the same from anywhere.
    common, apart = measured(base, tuned), measured(make_model(10), scratch)
    claims = [
        Claim(
            PAPER,
            f"features interpolate, after a common pretraining (α = {share:g})",
            "figures 2, 3",
            "in every layer 1 − cosine ≪ its baseline (here: a quarter), coefficient near 1 (±0.1)",
            _described(common, f"interpolation α={share:g}"),
            _is_linear(common, f"interpolation α={share:g}"),
        )
        for share in (0.25, 0.5, 0.75)
    ]
    claims.append(
        Claim(
            PAPER,
            "they do not without it (two models trained from scratch)",
            "figure 11",
            "not so in every layer",
            _described(apart, "interpolation α=0.5"),
            not _is_linear(apart, "interpolation α=0.5"),
        )
    )
    for kind in ("addition", "negation of a", "negation of b"):
        claims.append(
            Claim(
                PAPER,
                f"{kind}, λ = 0.4, after a common pretraining",
                "eq. (2), figures 7, 8" if kind == "addition" else "eq. (3), figures 7, 8",
                "in every layer 1 − cosine ≪ its baseline (here: a quarter), coefficient near 1 (±0.1)",
                _described(common, kind),
                _is_linear(common, kind),
            )
        )
    return Result(claims, common, apart)


def _is_linear(linearity: Linearity, kind: str) -> bool:
    found = linearity[kind]
    near = (1 - found.cosine).median(dim=1).values <= t.QUARTER * (1 - found.baseline).median(dim=1).values
    flat = (found.coefficient.median(dim=1).values - 1).abs() <= t.NEAR_ONE
    return bool((near & flat).all())


def _described(linearity: Linearity, kind: str) -> str:
    found = linearity[kind]
    layers = zip(
        (1 - found.cosine).median(dim=1).values.tolist(),
        (1 - found.baseline).median(dim=1).values.tolist(),
        found.coefficient.median(dim=1).values.tolist(),
        strict=True,
    )
    worst = max(layers, key=lambda layer: layer[0])
    return f"worst layer: 1 − cosine {worst[0]:.1e}, baseline {worst[1]:.1e}, coefficient {worst[2]:.3f}"
