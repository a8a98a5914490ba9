r"""Make one model good at many books: fine-tune it on each, and merge.

    accelerate launch recipes/multitask.py                                       # nothing to download: a few minutes
    accelerate launch recipes/multitask.py --method lora --output outputs/multitask-lora
    accelerate launch recipes/multitask.py --merge sum --merge-scale 0.5 --output outputs/atm
    accelerate launch recipes/multitask.py --merge dare --final tsv breadcrumbs \
        --rule-options gamma=0.02 dare.density=0.5
    accelerate launch recipes/multitask.py --base-model gpt2 --learning-rate 5e-5 --books one.txt two.txt three.txt

1. θ_0: a pretrained model.
2. For each N: all tasks are fine-tuned in N rounds, the same number of steps in all. A round starts from what the
   last one was merged into. N = 1 is plain merging; more rounds are MIMA (`--merge mean`, iterated averaging) or ATM
   (`--merge sum`, alternating tuning and merging).
3. The task models of the last round are merged: by uniform average, by task arithmetic and by TIES, with λ found on
   validation text.
4. How far is the merged model behind each task's own? What are the cosines of the task vectors?

Tasks are spread over the processes of `accelerate launch`; each needs the books of its own tasks only. In a round they
exchange their weights by all-reduce; the task vectors of the last round are saved in the output folder, from which all
processes read them for the last merge: it must be on a disk that all of them see. Finished rounds are kept, and an
interrupted run goes on after its last one.
"""

from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_taskvec import TaskVector
from hf_taskvec.distributed import processes
from hf_taskvec.experiments.book_reading import training_blocks
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.multitask import run_rounds
from hf_taskvec.experiments.multitask.multitask_config import MultitaskConfig
from hf_taskvec.experiments.multitask.multitask_inputs import prepare_multitask
from hf_taskvec.experiments.multitask.result_plots import save_plots
from hf_taskvec.experiments.multitask.results import MultitaskResults, RoundsOutcome
from hf_taskvec.experiments.multitask.task_scores import merged_model_scores, single_task_scores, task_scores
from hf_taskvec.experiments.recipe_running import print_once, run_recipe
from hf_taskvec.files.results_folder import open_results_folder
from hf_taskvec.models.loading import load_for_evaluation
from hf_taskvec.training.training_stages import TrainingStages

CONFIGS = Path(__file__).parent / "configs" / "multitask"


def main(arguments: list[str] | None = None) -> MultitaskResults:
    """Run the experiment with these flags, or those of the command line."""
    config = parse_config(
        MultitaskConfig, arguments, description=__doc__, configs=CONFIGS, default="default", unless=["base_model"]
    )
    logging.disable_progress_bar()  # of loading and saving; the rounds have their own
    given = prepare_multitask(config)  # all that can be wrong with the input is found here, before any work
    output = open_results_folder(config.output, config.resolved(given.inputs), config.force)
    cache = Path(config.cache or output / "stages")

    # 1. The base.
    base: Any = given.base
    if given.general is not None:
        stages = TrainingStages(cache, config.force, given.tokenizer, tell=print_once)
        base = stages.train(
            "base", base, training_blocks((given.general,), given.tokenizer, config), config.pretraining
        )
    model = load_for_evaluation(base)
    before = task_scores(model, given)

    outcomes, merged_vectors = [], {}
    for number in sorted(config.rounds):
        # 2. The rounds.
        steps = config.steps // number
        print_once(
            f"N = {number}: {number} round{'s'[: number > 1]} of {steps} steps for each of {len(given.tasks)} tasks"
        )
        folder = output / f"rounds-{number}"
        trace = run_rounds(
            base,
            given.tasks,
            config.training,
            folder,
            rounds=number,
            steps_per_round=steps,
            merge=config.ends_round,
            overwrite=config.force,
        )
        processes().wait_for_everyone()

        # 3. The last merge.
        vectors = [TaskVector.load(folder / "tasks" / task.name) for task in given.tasks]
        single = single_task_scores(model, vectors, given)
        merged = []
        for rule in config.final:
            found, merged_vectors[number, rule] = merged_model_scores(model, vectors, rule, given, config)
            merged.append(found)
        outcomes.append(RoundsOutcome(number, steps, single, tuple(merged), trace))

    # 4. The results.
    results = MultitaskResults(tuple(task.name for task in given.tasks), before, tuple(outcomes))
    last = merged_vectors[max(config.rounds), config.final[0]]
    last.apply(base, output / "model", overwrite=True)  # all processes share it
    if processes().is_main_process:
        results.save(output)
        save_plots(results, output)
        last.save(output / "vector", overwrite=True)
    processes().wait_for_everyone()
    print_once(f"\n{results.table()}\n\nθ_0 has {sum(before) / len(before):.3f}.")
    print_once(f"the report {output / 'report.md'}, the model {output / 'model'}, its vector {output / 'vector'}")
    return results


if __name__ == "__main__":
    run_recipe(main)
