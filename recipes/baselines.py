r"""Task vectors beside the usual unlearning methods: one model, one text, one budget, one report.

    accelerate launch recipes/baselines.py                                        # embedded, nothing to download
    accelerate launch recipes/baselines.py --methods npo rmu --budget 0.25
    accelerate launch recipes/baselines.py --config stories15m --base-model stories15M --audit true \
        --books forget=one.txt aligned=two.txt retain=three.txt

Steps 1 to 4 are those of recipes/unlearn.py, and so are the flags; finished stages are shared through `--cache`.

1. θ_0: a pretrained model.
2. θ_0': θ_0 fine-tuned on all books.
3. τ = θ_forget − θ_0, the task vector of the book to forget.
4. The reference: θ_0 fine-tuned on all the other books. It never saw the one to forget.
5. Task vectors: θ_0' + λτ for each λ; the edit that goes further (`--edit`); and MUSE's, τ' of θ_0' trained *further*
   on the book, θ_0' + λτ' for each λ.
6. The others: each of `--methods`, with the authors' settings, once for each of `--method-learning-rates`, trained on
   as many tokens as `--budget` of a retraining.
7. One report of all edits. Each method stands in the table by the edit that comes nearest on one half of the passages,
   judged on the other half, with what it cost.
8. The audit of each method's edit (`--audit`): does the book come back?
"""

import json
from functools import partial
from itertools import takewhile
from pathlib import Path

from transformers.utils import logging

from hf_taskvec import TaskVector
from hf_taskvec.atomic import write_text
from hf_taskvec.auditing import AuditReport, Relearning, audit
from hf_taskvec.distributed import processes
from hf_taskvec.evaluation import UnlearningReport, sweep
from hf_taskvec.evaluation.texts.books import all_kept
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.recipe_running import print_once, run_recipe
from hf_taskvec.experiments.unlearning.baselines_config import BaselinesConfig
from hf_taskvec.experiments.unlearning.compared_methods import (
    ComparedEdit,
    Cost,
    compared_methods,
    comparison_table,
    nearest_edits,
    tokens_of,
    unlearned_edits,
)
from hf_taskvec.experiments.unlearning.unlearn_inputs import prepare_unlearning
from hf_taskvec.experiments.unlearning.work_ahead import work_ahead
from hf_taskvec.files.results_folder import open_results_folder
from hf_taskvec.forgetting.edit_kinds import ForgetCase, check_kinds
from hf_taskvec.forgetting.edit_search import search_edits
from hf_taskvec.models.loading import load_for_evaluation
from hf_taskvec.training.training_stages import TrainingStages

CONFIGS = Path(__file__).parent / "configs"
TABLE, NUMBERS = "comparison.md", "comparison.json"


def main(arguments: list[str] | None = None) -> UnlearningReport:
    """Run the comparison with these flags, or those of the command line."""
    config = parse_config(
        BaselinesConfig, arguments, description=__doc__, configs=CONFIGS, default="default", unless=["base_model"]
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
    forget_blocks, keep_blocks = given.blocks(forget), given.blocks(others)

    # 1. to 4. The base, the model that knows all books, the task vector, the reference.
    base = given.base
    if given.general is not None:
        base = stages.train("base", base, given.blocks([given.general]), config.pretraining)
    settings = config.training(config.joint_method)
    joint = config.joint_model or stages.train_model("joint", base, given.blocks(given.books), settings)
    told = tokens_of(forget_blocks) * config.training(config.method).epochs
    made = Cost()  # of the vector, if it is made here
    if config.task_vector:
        vector = TaskVector.load(config.task_vector)
    elif config.adapter or (config.method == "lora" and not config.tuned_model):
        adapter = config.adapter or stages.train("forget", base, forget_blocks, config.training("lora"))
        made = made if config.adapter else Cost.of_stage(Path(adapter), told)
        vector = TaskVector.from_adapter(adapter, base=base, name="forget")
    else:
        tuned = config.tuned_model or stages.train("forget", base, forget_blocks, config.training("full"))
        made = made if config.tuned_model else Cost.of_stage(Path(tuned), told)
        vector = TaskVector.from_finetuned(base, tuned, name="forget")
    reference = config.reference_model or stages.train_model("retrain", base, keep_blocks, settings)

    # 5. Task vectors.
    model, never = load_for_evaluation(joint), load_for_evaluation(reference)
    asking = partial(
        sweep,
        model,
        scales=None,
        books=all_kept(given.books),
        protocol=config.asking,
        tokenizer=given.tokenizer,
        reference={"retrained": never},
        store=output / "store",
        batch_size=config.evaluation_batch_size,
        criteria=config.criteria,
        seed=config.seed,
    )
    scales = [scale for scale in config.scales if scale]
    edits = [ComparedEdit("task vector", f"{scale:g}*forget", scale * vector, made) for scale in scales]
    if config.edits:
        print_once(f"edit: {config.edit}")
        case = ForgetCase(
            address=joint,
            model=model,
            vector=vector,
            keep_vectors={},
            forget_blocks=forget_blocks,
            keep_blocks=keep_blocks,
            reference=never,
            criteria=config.criteria,
            repairing=config.repairing,
            repairs=stages.cache,
            tokenizer=given.tokenizer,
        )
        searched = search_edits(case, check_kinds([config.edit], {}), asking, rounds=config.edit_rounds)
        # The first one with what is only adjusted after it, which trains nothing; and the whole search, for whose
        # nearest edit every other was trained.
        costs = [Cost(edit.tokens, edit.seconds, edit.peak_bytes) for edit in searched.tried if not edit.after]
        first = [searched.tried[0], *takewhile(lambda edit: edit.after, searched.tried[1:])]
        edits += [ComparedEdit(config.edit, edit.name, edit.vector, made + costs[0]) for edit in first]
        if len(costs) > 1:
            all_of_it = sum(costs, made)
            name = f"{config.edit}, searched"
            edits += [ComparedEdit(name, edit.name, edit.vector, all_of_it) for edit in searched.tried]
    further = stages.train("further", joint, forget_blocks, config.training(config.method))
    if config.method == "lora":
        more = TaskVector.from_adapter(further, base=joint, name="further")
    else:
        more = TaskVector.from_finetuned(joint, further, name="further")
    took = Cost.of_stage(further, told)
    edits += [ComparedEdit("MUSE's task vector", f"{scale:g}*further", scale * more, took) for scale in scales]

    # 6. The others.
    edits += unlearned_edits(config, stages, joint, forget_blocks, keep_blocks)

    # 7. One report; and what retraining itself loses of the other books.
    vectors = {edit.name: edit.vector for edit in edits if edit.vector is not None}
    print_once(f"report: {len(vectors)} edits")
    report = asking(vectors)
    retraining = tokens_of(keep_blocks) * settings.epochs
    cost = Cost() if config.reference_model else Cost.of_stage(stages.trained(Path(reference)), retraining)
    change = TaskVector.from_finetuned(joint, reference, name="retraining")
    retrained = ComparedEdit("retrained", "without the book", change, cost)
    beside = asking({retrained.name: change})
    audits: dict[str, AuditReport] = {}

    # 8. Does it hold under attack?
    if config.audit:
        budget = Relearning(
            learning_rate=config.learning_rate,
            batch_size=config.batch_size,
            block_length=config.block_length,
            seed=config.seed,
        )
        for method, edit in nearest_edits(report, edits).items():
            if edit.vector is None:
                continue
            print_once(f"audit: {method}, {edit.name}")
            audits[method] = audit(
                model,
                edit.vector,
                given.books,
                config.asking,
                reference=never,
                tokenizer=given.tokenizer,
                criteria=config.criteria,
                attacks=config.audit_attacks,
                passages=config.audit_passages,
                relearning=budget,
                lora_learning_rate=config.lora_learning_rate,
                output=output / "audits" / method.replace("'", "").replace(",", "").replace(" ", "-"),
                store=output / "store",
                batch_size=config.evaluation_batch_size,
                seed=config.seed,
            )

    methods = compared_methods(report, edits, retraining, audits)
    methods += compared_methods(beside, [retrained], retraining)[1:]
    table = comparison_table(methods, config.criteria.judged)
    if processes().is_main_process:
        report.save(output)
        write_text(output / TABLE, table + "\n")
        numbers = json.dumps([each.to_json() for each in methods], indent=1, ensure_ascii=False)
        write_text(output / NUMBERS, numbers + "\n")
    processes().wait_for_everyone()
    print_once(f"\n{table}\n\nthe table     {output / TABLE}\nthe report    {output / 'report.md'}")
    return report


if __name__ == "__main__":
    run_recipe(main)
