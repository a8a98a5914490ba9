r"""Reach a book that nothing was fine-tuned on, by the task vectors of others: Theorem 3 on language models.

    accelerate launch recipes/transfer.py                                   # nothing to download: a few minutes
    accelerate launch recipes/transfer.py --base-model gpt2 --learning-rate 5e-5 \
        --books one.txt two.txt three.txt --new-books four.txt              # fine-tunes on three, reaches the fourth
    accelerate launch recipes/transfer.py --base-model gpt2 --vectors me/one me/two \
        --books one.txt two.txt --new-books three.txt                       # fine-tunes nothing
    accelerate launch recipes/transfer.py --base-model gpt2 --learning-rate 5e-5 \
        --books one.txt two.txt three.txt                                   # each in turn is the new one

1. θ_0: a pretrained model.
2. The task vectors of the known books, given or fine-tuned here.
3. What a new book has in common with them: γ̂, eq. (11) of Li et al. 2025, from a sample of its text. One gradient step
   on it stands for the fine-tune that there is not; what such a step shows of the known books corrects it.
4. The λ that Theorem 3 gives, and the merged model.
5. How well does it predict the new book's other text: beside θ_0, each vector alone, their mean, and λ learned on the
   sample?
6. The report, and the vector (of a new book that is not one of --books also the model) are saved.

The theorem is about tasks that have nothing to do with each other; the report says where the books do not meet that.
"""

from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_taskvec import TaskVector
from hf_taskvec.algebra.expressions import label_for
from hf_taskvec.distributed import processes
from hf_taskvec.experiments.book_reading import training_blocks
from hf_taskvec.experiments.config_options import parse_config
from hf_taskvec.experiments.recipe_running import print_once, run_recipe
from hf_taskvec.experiments.transfer.new_book import Case, reach, step_shows
from hf_taskvec.experiments.transfer.transfer_config import TransferConfig
from hf_taskvec.experiments.transfer.transfer_inputs import prepare_transfer
from hf_taskvec.experiments.transfer.transfer_results import TransferResults
from hf_taskvec.extraction.from_any import open_vector
from hf_taskvec.files.results_folder import open_results_folder
from hf_taskvec.models.loading import load_for_evaluation
from hf_taskvec.progress import progress_bar
from hf_taskvec.training.training_stages import TrainingStages

CONFIGS = Path(__file__).parent / "configs" / "transfer"


def main(arguments: list[str] | None = None) -> TransferResults:
    """Run the experiment with these flags, or those of the command line."""
    config = parse_config(
        TransferConfig, arguments, description=__doc__, configs=CONFIGS, default="default", unless=["base_model"]
    )
    logging.disable_progress_bar()  # of loading and saving; the stages have their own
    given = prepare_transfer(config)  # all that can be wrong with the input is found here, before any work
    output = open_results_folder(config.output, config.resolved(given.inputs), config.force)
    stages = TrainingStages(Path(config.cache or output / "stages"), config.force, given.tokenizer, tell=print_once)

    # 1. The base.
    base: Any = given.base
    if given.general is not None:
        blocks = training_blocks((given.general,), given.tokenizer, config)
        base = stages.train("base", base, blocks, config.pretraining)

    # 2. The known books' vectors.
    vectors: dict[str, TaskVector] = {}
    for book in given.books:
        if book.name in given.given:
            vectors[book.name] = given.given[book.name]
            continue
        label = label_for(book.name)
        tuned = stages.train(label, base, training_blocks((book,), given.tokenizer, config), config.training)
        vectors[book.name] = open_vector(tuned, base, name=label)

    # 3. to 5. Each new book.
    model, found = load_for_evaluation(base), []
    shown = {name: step_shows(model, vector, given.rows[name], config.rows) for name, vector in vectors.items()}
    in_turn = not given.new
    for new in progress_bar(given.new or given.books, "New books", None, unit="book"):
        others = {name: vector for name, vector in vectors.items() if name != new.name}
        case = Case(model, new.name, others, given.rows, config, shown, vectors[new.name] if in_turn else None)
        result, vector = reach(case)
        found.append(result)

        # 6. What is kept.
        if vector is not None and processes().is_main_process:
            vector.save(output / "vectors" / label_for(new.name), overwrite=True)
        if vector is not None and not in_turn:
            vector.apply(base, output / "models" / label_for(new.name), overwrite=True)  # all processes share it
    results = TransferResults(tuple(found))
    if processes().is_main_process:
        results.save(output)
    processes().wait_for_everyone()
    print_once(f"\n{results.table()}\n")
    print_once("\n".join(book.sentence for book in results.books))
    print_once(f"\nthe report {output / 'report.md'}, the vectors {output / 'vectors'}")
    return results


if __name__ == "__main__":
    run_recipe(main)
