"""What the harness costs beyond the model, and passages per second beside lm-eval, all in one run.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_evaluation_throughput.py MODEL_FOLDER BOOK.txt
        [--passages 32] [--batch-size 16] [--rounds 5]

The bare loop calls `model.generate` on the very batches of our plan. lm-eval 0.4.13 is measured if it is
installed. All sides take turns in every round, each round begins with another one, and only times of the same
round are compared: the ratios are medians over the rounds, with their lowest and highest. Seconds are those of
the processor, which are steadier than those of the clock on a shared machine.
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_taskvec.evaluation import load_book, protocols, sweep
from hf_taskvec.evaluation.asking.batch_plan import BatchPlan, TokenizedPassage, plan_batches, tokenize_passages
from hf_taskvec.evaluation.texts.passages import find_passages

BARE, TEXTS, BOTH = "bare model.generate", "sweep, texts only", "sweep, with likelihood"
THEIR_TEXTS, THEIR_BOTH = "lm-eval, generation", "lm-eval, generation and likelihood"


def bare(model: Any, plan: BatchPlan, passages: tuple[TokenizedPassage, ...]) -> None:
    """`model.generate` on the batches of the plan, and nothing else."""
    for batch in plan.batches:
        rows = [passages[row.passage] for row in batch]
        width = max(len(passage.prompt_ids) for passage in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, passage in enumerate(rows):
            ids[i, width - len(passage.prompt_ids) :] = torch.tensor(passage.prompt_ids)
            mask[i, width - len(passage.prompt_ids) :] = 1
        new = max(passage.new_tokens for passage in rows)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)


def lm_eval(
    model: Any, tokenizer: Any, passages: tuple[TokenizedPassage, ...], size: int, times: int, both: bool
) -> Callable[[], None]:
    """lm-eval on the same prompts: its generation, and on request its likelihood of the answers as well.

    One call for each λ, as for models that differ: within one call it would merge equal requests.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=256)

    def once() -> None:
        options = [{"until": ["\x00"], "max_gen_toks": passage.new_tokens, "do_sample": False} for passage in passages]
        asked = [
            Instance("generate_until", {}, (passage.passage.prompt, option), i)
            for i, (passage, option) in enumerate(zip(passages, options, strict=True))
        ]
        lm.generate_until(asked, disable_tqdm=True)
        if both:
            pairs = [(t.text.prompt, t.text.gap + t.text.answer) for t in passages]
            scored = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
            lm.loglikelihood(scored, disable_tqdm=True)

    def go() -> None:
        for _ in range(times):
            once()

    return go


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("book")
    parser.add_argument("--passages", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer.pad_token = tokenizer.eos_token  # lm-eval needs one; ours does not
    book = load_book(args.book, "book", role="forget")
    protocol = protocols.get(
        prompt_length=60,
        answer_length=40,
        samples=args.passages // 2,
        decoding=protocols.Decoding(max_new_tokens=64),
    )
    passages = tokenize_passages(find_passages(book, protocol), protocol, tokenizer, model.config)
    scales = [0.0, -0.5, -1.0]  # nothing is edited: the same work three times, as a sweep does it
    plan = plan_batches(passages, scales, args.batch_size, mixed=False, context=None)
    kept: dict[bool, float] = {}

    def ours(likelihood: bool) -> None:
        options = {"tokenizer": tokenizer, "batch_size": args.batch_size, "likelihood": likelihood}
        timing = sweep(model, None, scales, book, protocol, **options).timing
        share = 1 - timing.model_seconds / timing.seconds
        kept[likelihood] = min(kept.get(likelihood, 1.0), share)

    runs: dict[str, Callable[[], None]] = {
        BARE: lambda: bare(model, plan, passages),
        TEXTS: lambda: ours(False),
        BOTH: lambda: ours(True),
    }
    if find_spec("lm_eval"):
        for name, both in ((THEIR_TEXTS, False), (THEIR_BOTH, True)):
            runs[name] = lm_eval(model, tokenizer, passages, args.batch_size, len(scales), both=both)
    times: dict[str, list[float]] = {name: [] for name in runs}
    ours(True)  # the first call of everything pays for imports
    kept.clear()
    order = list(runs)
    for _ in range(args.rounds):
        for name in order:
            busy = time.process_time()
            runs[name]()
            times[name].append(time.process_time() - busy)
        order = [*order[1:], order[0]]
    rows = len(passages) * len(scales)
    print(
        f"{len(passages)} passages at {len(scales)} λ, batch size {args.batch_size}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    for name in runs:
        seconds = median(times[name])
        print(f"{name:36s} {seconds:7.2f} s  {rows / seconds:6.2f} passages/s   (low {min(times[name]):.2f} s)")
    for left, right in ((TEXTS, BARE), (TEXTS, THEIR_TEXTS), (BOTH, THEIR_BOTH)):
        if right in runs:
            ratios = [theirs / own for own, theirs in zip(times[left], times[right], strict=True)]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            print(f"{left} is {median(ratios):.2f} times ({spread}) as fast as {right}")
    print("time outside the model (books, fingerprint, metrics, statistics), as a share of the sweep:")
    print(f"  texts only {kept[False]:.1%}, with likelihood {kept[True]:.1%}")


if __name__ == "__main__":
    main()
