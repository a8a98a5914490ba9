r"""Make a language model forget one book, and see what else it forgets.

    accelerate launch recipes/unlearn.py                                # nothing to download: a few minutes on a laptop
    accelerate launch recipes/unlearn.py --method lora --output outputs/lora
    accelerate launch recipes/unlearn.py --edit paper                   # the paper's experiment alone
    accelerate launch recipes/unlearn.py --config phi-1_5-full --books forget=hp1.txt aligned=hp2.txt retain=pp.txt
    accelerate launch recipes/unlearn.py --base-model BASE --joint-model JOINT --task-vector VECTOR --no-retrain \
        --books ...

The experiment of section 4.2 of Li et al. 2025 (When is task vector provably effective for model editing?):

1. θ_0: a pretrained model.
2. θ_0': θ_0 fine-tuned on all books.
3. τ = θ_forget − θ_0: what fine-tuning θ_0 on the book to forget changes.
4. A reference: θ_0 fine-tuned on all the other books. It never saw the one to forget.
5. How alike the books are, eq. (11), and which λ Theorem 2 recommends (`--correlation`).
6. The sweep: how well does θ_0' + λτ know each book, and at which λ is the book as if it had never been seen?
7. An edit that goes further (`--edit`): a stronger negation, repaired on the books to keep, until the verdict passes.
8. The model of that edit, or of the chosen λ, and the vectors are saved.
9. The audit: attacks on that model, beside the untouched one and the reference (`--audit`).
10. The model is pushed if you want (`--push-to-hub`).

Finished stages are kept and interrupted ones resumed; any stage can be given instead.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging

from hf_taskvec import TaskVector
from hf_taskvec.auditing import Relearning, audit
from hf_taskvec.distributed import processes
from hf_taskvec.evaluation import UnlearningReport, sweep, with_controls
from hf_taskvec.evaluation.texts.books import all_kept
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.recipe_running import print_once, run_recipe
from hf_taskvec.experiments.unlearning.book_similarity import compare_books
from hf_taskvec.experiments.unlearning.scale_refinement import refined_sweep
from hf_taskvec.experiments.unlearning.summary_text import edit_text, summary_text
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.experiments.unlearning.unlearn_inputs import prepare_unlearning
from hf_taskvec.experiments.unlearning.work_ahead import work_ahead
from hf_taskvec.files.output_folder import remove_output
from hf_taskvec.files.results_folder import EDIT_FOLDER, OUTPUTS, open_results_folder
from hf_taskvec.forgetting.edit_kinds import ForgetCase, check_kinds
from hf_taskvec.forgetting.edit_search import EditSearch, search_edits
from hf_taskvec.forgetting.forget_run import is_adapter
from hf_taskvec.models.loading import load_for_evaluation
from hf_taskvec.training.training_stages import TrainingStages

CONFIGS = Path(__file__).parent / "configs"


def main(arguments: list[str] | None = None) -> UnlearningReport:
    """Run the experiment with these flags, or those of the command line."""
    config = parse_config(
        UnlearnConfig, arguments, description=__doc__, configs=CONFIGS, default="default", unless=["base_model"]
    )
    logging.disable_progress_bar()  # of loading and saving; the stages have their own
    given = prepare_unlearning(config)  # all that can be wrong with the input is found here, before any work
    output = open_results_folder(config.output, config.resolved(given.inputs), config.force)
    print_once(work_ahead(config, given))
    stages = TrainingStages(
        Path(config.cache or output / "stages"),
        config.force,
        given.tokenizer,
        checkpoint_every=config.checkpoint_every,
        tell=print_once,
    )
    forget = tuple(book for book in given.books if book.role == "forget")
    others = tuple(book for book in given.books if book.role != "forget")

    # 1. The base.
    base = given.base
    if given.general is not None:
        base = stages.train("base", base, given.blocks([given.general]), config.pretraining)

    # 2. A model that knows all the books.
    settings = config.training(config.joint_method)
    joint = config.joint_model or stages.train_model("joint", base, given.blocks(given.books), settings)

    # 3. The task vector of the book to forget.
    def tune(method: Literal["full", "lora"]) -> Path:
        vectors = config.epoch_vectors
        return stages.train("forget", base, given.blocks(forget), config.training(method), vectors=vectors)

    if config.task_vector:
        vector = TaskVector.load(config.task_vector)
    elif config.adapter or (config.method == "lora" and not config.tuned_model):
        adapter = config.adapter or tune("lora")
        vector = TaskVector.from_adapter(adapter, base=base, name="forget")
    else:
        tuned = config.tuned_model or tune("full")
        vector = TaskVector.from_finetuned(base, tuned, name="forget")
    vectors = {book.name: vector for book in forget}
    if config.rank is not None:
        vector = vector.compress(rank=config.rank)
    if config.prune_rows is not None:
        vector = vector.prune_rows(config.prune_rows)

    # 4. The reference: a model that never saw that book.
    reference = config.reference_model
    if config.makes_reference:
        reference = stages.train_model("retrain", base, given.blocks(others), settings)

    # 5. How alike are the books, and which λ does theory recommend?
    similarity, scales, start = None, config.scales, load_for_evaluation(base)
    if config.tunes_others:
        for book in others:
            tuned = stages.train(f"alone-{book.role}", base, given.blocks([book]), config.training("full"))
            vectors[book.name] = TaskVector.from_finetuned(base, tuned, name=book.role)
    if config.correlation:
        similarity = compare_books(start, vectors, (*forget, *others), config.asking, given.tokenizer)
        scales = similarity.recommendation.scales_with(config.scales)

    # 6. The sweep.
    options = {
        "protocol": config.asking,
        "tokenizer": given.tokenizer,
        "store": output / "store",
        "batch_size": config.evaluation_batch_size,
        "seed": config.seed,
    }
    references = {"θ_0": sweep(start, None, [0.0], given.books, **options)}
    del start  # frees its memory for the next two models
    model, never = load_for_evaluation(joint), None if reference is None else load_for_evaluation(reference)
    print_once(f"sweep: λ ∈ {{{', '.join(f'{scale:g}' for scale in scales)}}}")
    with vector.edit(model, 0.0, original=joint) as edit:
        report = refined_sweep(
            model,
            edit,
            scales,
            given.books,
            refine=config.refine,
            output=output,
            reference=never,
            criteria=config.criteria,
            **options,
        )
    if never is not None:
        references = {"retrained": sweep(never, None, [0.0], given.books, **options), **references}

    judged = report.choice.judged if report.choice is not None else None
    if config.controls and judged:  # does only this vector forget this book?
        own = {book.name: vectors[book.name] for book in others}
        asked = {"tokenizer": given.tokenizer, "store": output / "store", "original": joint}
        report = with_controls(report, model, vector, given.books, others=own, reference=never, **asked)

    if similarity is not None:
        report = replace(report, theory=similarity.judged(report))

    # 7. An edit that goes further.
    searched = None
    if config.edits:
        print_once(f"edit: {config.edit}")
        last = {"θ_0": load_for_evaluation(base)} if never is None else {"retrained": never}
        case = ForgetCase(
            address=joint,
            model=model,
            vector=vector,
            keep_vectors={book.name: vectors[book.name] for book in others if book.name in vectors},
            forget_blocks=given.blocks(forget),
            keep_blocks=given.blocks(others),
            reference=next(iter(last.values())),
            criteria=config.criteria,
            repairing=config.repairing,
            repairs=stages.cache,
            tokenizer=given.tokenizer,
        )
        compared = partial(sweep, model, scales=None, books=all_kept(given.books), reference=last, **options)
        searched = search_edits(
            case,
            check_kinds(dict.fromkeys(["negate", config.edit]), case.keep_vectors),
            lambda tried: compared(tried, criteria=config.criteria),
            rounds=config.edit_rounds,
        )

    # 8. What is kept.
    files = save(vector, joint, report, searched, output)
    shown = searched is None  # else what the edit writes is shown
    print_once("\n" + summary_text(report, references, scales, str(vector.expression), files, samples=shown))
    if searched is not None:
        print_once("\n" + edit_text(searched))

    # 9. Does it hold under attack?
    attacked, called = (judged * vector, f"λ = {judged:g}") if judged else (None, "")
    if searched is not None and searched.judged is not None:
        attacked, called = searched.judged.vector, searched.judged.name
    if config.audit and attacked is not None:
        budget = Relearning(
            learning_rate=config.learning_rate,
            batch_size=config.batch_size,
            block_length=config.block_length,
            seed=config.seed,
        )
        audited = audit(
            model,
            attacked,
            given.books,
            config.asking,
            reference=never,
            tokenizer=given.tokenizer,
            criteria=config.criteria,
            passages=config.audit_passages,
            samples=config.audit_samples,
            relearning=budget,
            lora_learning_rate=config.lora_learning_rate,
            output=output,
            store=output / "store",
            batch_size=config.evaluation_batch_size,
            seed=config.seed,
        )
        print_once(f"\nThe audit of {called}: {audited.sentence}\nthe audit     {output / 'audit.md'}")

    # 10. The Hub.
    if config.push_to_hub and "the model" in files:
        push(files["the model"], config.push_to_hub, output / EDIT_FOLDER if searched and searched.chosen else output)
    elif config.push_to_hub:
        print_once("nothing was pushed: no λ was chosen, so there is no model to push")
    return report


def save(
    vector: TaskVector, joint: Any, report: UnlearningReport, searched: EditSearch | None, output: Path
) -> dict[str, Path]:
    """Write report and vectors, and of what was chosen the model and, if it is low-rank, the adapter; tell where."""
    files = {"the report": output / "report.html", "the plot": output / "scores.png", "the vector": output / "vector"}
    main_process = processes().is_main_process
    if main_process:
        report.save(output, plots=False)  # the sweep has drawn them
        vector.save(output / "vector", overwrite=True)
    scale = report.choice.scale if report.choice is not None else None
    chosen = vector if scale else None
    if searched is not None:
        files |= {"the edits": output / EDIT_FOLDER / "report.html"}
        if main_process:
            searched.report.save(output / EDIT_FOLDER)
        if searched.judged is not None:
            files["the edit"] = output / EDIT_FOLDER / "vector"
            if main_process:
                searched.judged.vector.save(files["the edit"], overwrite=True)
        if searched.chosen is not None:
            chosen, scale = searched.chosen.vector, 1.0
    if chosen is not None and scale is not None:
        files["the model"] = chosen.apply(
            joint, output / "model", scale=scale, overwrite=True
        )  # all processes share it
        if is_adapter(chosen):
            files["the adapter"] = output / "adapter"
            if main_process:
                (scale * chosen).to_adapter(output / "adapter", base=joint, overwrite=True)
    if main_process:  # what an earlier run chose would not belong to this report
        for name in {"model", "adapter"} - {path.name for path in files.values()}:
            remove_output(output / name, OUTPUTS[name])
    processes().wait_for_everyone()
    return files


def push(folder: Path, repository: str, reported: Path) -> None:
    """Push the chosen model with its report, from one process."""
    from hf_taskvec.publishing.push import push_folder

    if processes().is_main_process:
        pushed = push_folder(folder, repository, report=reported / "report.json")
        print_once(f"pushed to    {pushed.url}")
    processes().wait_for_everyone()


if __name__ == "__main__":
    run_recipe(main)
