"""Task vectors in a minute, with nothing to download: make two, add them, negate one, and look at what happens.

    make demo
    accelerate launch recipes/demo.py [--output outputs/demo] [--seed 0]

1. A tiny Phi learns to spell simple sentences: the base θ0.
2. It is fine-tuned on two little books: one fully (the fox's tale), one with LoRA (the clockmaker's). Each gives a vector.
3. The vectors are added to θ0, half of each: one model that knows something of both books.
4. Another model learns both books together. From it the fox's vector is subtracted, λ by λ: that book is forgotten first.

The losses are those of real models on real (if simple) text; nothing is tuned to come out.
"""

import argparse
import copy
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm
from transformers import PhiConfig, PhiForCausalLM

from hf_taskvec import TaskVector

PEOPLE, PLACES = ["the man", "the girl", "my uncle", "a child"], ["the house", "the river", "the field", "the town"]
VERBS, THINGS = ["saw", "found", "lost", "liked"], ["a stone", "the bread", "an old hat", "the key"]
BOOKS = {
    "fox": (["the fox", "her cub", "the crow"], ["the den", "the oak", "the burrow"], ["hid", "stole", "buried"], ["an egg", "a feather", "the acorn"]),
    "clock": (["the clockmaker", "his pupil", "the duke"], ["the tower", "the workshop", "the square"], ["wound", "mended", "sold"], ["a spring", "the brass wheel", "a pendulum"]),
}  # fmt: skip
LENGTH = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder for the plot and the vectors")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts and of the training")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    texts = {
        name: write(words, options.seed)
        for name, words in {"general": (PEOPLE, PLACES, VERBS, THINGS), **BOOKS}.items()
    }
    letters = sorted(set("".join(texts.values())))
    held_out = {name: encode(text[-6000:], letters) for name, text in texts.items()}
    training = {name: encode(text[:-6000], letters) for name, text in texts.items()}

    base = PhiForCausalLM(PhiConfig(vocab_size=len(letters), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH))  # fmt: skip
    train(base, training["general"], steps=400, rate=3e-3, label="θ0 on general text")
    tuned = train(copy.deepcopy(base), training["fox"], steps=150, rate=1e-3, label="full fine-tune on the fox's tale")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "fc1", "fc2"])
    adapter = train(
        get_peft_model(copy.deepcopy(base), lora),
        training["clock"],
        steps=300,
        rate=5e-3,
        label="LoRA on the clockmaker's",
    )
    joint = train(
        copy.deepcopy(base),
        torch.cat([training["fox"], training["clock"]]),
        steps=300,
        rate=1e-3,
        label="full fine-tune on both books",
    )

    fox = TaskVector.from_finetuned(base, tuned, name="fox")
    clock = TaskVector.from_adapter(adapter, name="clock")  # its factors stay factors
    print(f"\n{fox}\n\n{clock}\n\ncosine of the two: {fox.cosine(clock):+.3f}\n")

    rows = {"θ0": losses(base, held_out)}
    for vector in (fox, clock, 0.5 * fox + 0.5 * clock):
        with vector.applied_to(base):  # edited in place, restored bit for bit afterwards
            rows[f"θ0 + {vector.expression}"] = losses(base, held_out)
    edit = fox.edit(joint, 0.0)
    sweep = {}
    for scale in (0.0, -0.2, -0.4, -0.6, -0.8, -1.0):
        edit.set_scale(scale)  # from the untouched weights, never by adding up
        sweep[scale] = losses(joint, held_out)
        rows[f"joint − {-scale}*fox" if scale else "joint fine-tune"] = sweep[scale]
    edit.restore()

    print("Loss on held-out text (nats per letter; lower means better known):\n\n" + table(rows))
    options.output.mkdir(parents=True, exist_ok=True)
    for vector in (fox, clock):
        vector.save(options.output / vector.expression, overwrite=True)
    print(
        f"\nSaved: {options.output / 'fox'}, {options.output / 'clock'}, {plot(sweep, options.output / 'forgetting.png')}"
    )


def write(words: tuple[list[str], ...], seed: int, sentences: int = 900) -> str:
    """Sentences of one world: its people, places, deeds and things."""
    people, places, verbs, things = words
    chance = random.Random(f"{seed} {people}")
    pick = chance.choice
    patterns = [
        lambda: f"{pick(people)} {pick(verbs)} {pick(things)} near {pick(places)}. ",
        lambda: f"in {pick(places)} {pick(people)} {pick(verbs)} {pick(things)}. ",
        lambda: f"then {pick(people)} went to {pick(places)}. ",
    ]
    return "".join(pick(patterns)() for _ in range(sentences))


def encode(text: str, letters: list[str]) -> torch.Tensor:
    """Rows of letters, as numbers."""
    numbers = torch.tensor([letters.index(letter) for letter in text])
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


def train(model: torch.nn.Module, rows: torch.Tensor, steps: int, rate: float, label: str) -> torch.nn.Module:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.1)
    bar = tqdm(range(steps), desc=f"{label:33}", disable=None)
    for _ in bar:
        batch = rows[torch.randint(len(rows), (32,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    return model.eval()


@torch.inference_mode()
def losses(model: torch.nn.Module, texts: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: model(input_ids=rows, labels=rows).loss.item() for name, rows in texts.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [f"{'model':28}" + "".join(f"{name:>10}" for name in names)]
    lines += [f"{model:28}" + "".join(f"{row[name]:10.3f}" for name in names) for model, row in rows.items()]
    return "\n".join(lines)


def plot(sweep: dict[float, dict[str, float]], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    labels = {
        "fox": ("the fox's tale (to forget)", "#D55E00"),
        "clock": ("the clockmaker's (to keep)", "#0072B2"),
        "general": ("general text", "#767676"),
    }
    for name, (label, colour) in labels.items():
        axes.plot(list(sweep), [row[name] for row in sweep.values()], "o-", color=colour, label=label)
    axes.set(
        xlabel="λ of the fox's task vector",
        ylabel="loss on held-out text (nats per letter)",
        title="Subtracting a task vector forgets its book",
    )
    axes.invert_xaxis()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
