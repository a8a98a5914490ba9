"""What a run of the unlearning experiment takes, told before its first stage: passages, time and memory."""

from collections.abc import Sequence

from hf_taskvec.evaluation.asking.asking_cost import asking_cost
from hf_taskvec.evaluation.asking.batch_plan import plan_batches, tokenize_passages
from hf_taskvec.evaluation.texts.books import Book
from hf_taskvec.evaluation.texts.passages import find_passages
from hf_taskvec.experiments.unlearning.unlearn_config import UnlearnConfig
from hf_taskvec.experiments.unlearning.unlearn_inputs import UnlearnInputs
from hf_taskvec.machine_speed import duration
from hf_taskvec.models.model_facts import context_length
from hf_taskvec.sizes import memory_size
from hf_taskvec.training.settings import TrainingSettings
from hf_taskvec.training.trained_model import meta_model, open_base
from hf_taskvec.training.training_cost import training_cost

_BATCH = 16  # rows, as on a CPU


def work_ahead(config: UnlearnConfig, given: UnlearnInputs) -> str:
    """A sentence on what is ahead. What an earlier run has finished counts as if it were done again.

    Args:
        config (`UnlearnConfig`):
            What is made, and how.
        given (`UnlearnInputs`):
            Books, model and tokenizer.
    """
    forget = [book for book in given.books if book.role == "forget"]
    others = [book for book in given.books if book.role != "forget"]
    joint = config.training(config.joint_method)
    stages: list[tuple[Sequence[Book], TrainingSettings]]
    stages = [([given.general], config.pretraining)] if given.general is not None else []
    stages += [(given.books, joint)] if config.makes_joint else []
    stages += [(forget, config.training(config.method))] if config.makes_vector else []
    stages += [(others, joint)] if config.makes_reference else []
    if config.tunes_others:
        stages += [([book], config.training("full")) for book in others]
    trainings = [training_cost(given.base, given.blocks(books), settings) for books, settings in stages]

    shape = open_base(given.base).config
    passages = [
        each
        for book in given.books
        for each in tokenize_passages(
            find_passages(book, config.asking, given.tokenizer), config.asking, given.tokenizer, shape
        )
    ]
    # θ_0', at λ = 0 too; θ_0; and the model that never saw the book.
    asked = len({0.0, *config.scales}) + 1 + (config.makes_reference or config.reference_model is not None)
    plan = plan_batches(
        passages, [0.0], config.evaluation_batch_size or _BATCH, mixed=False, context=context_length(shape)
    )
    batches = [[passages[row.passage] for row in batch] for batch in plan.batches]
    model = meta_model(shape)
    asking = asking_cost(model, batches)
    trained, answered = sum(each.seconds for each in trainings), asked * asking.seconds
    weights = 4 * (2 + 1) * sum(parameter.numel() for parameter in model.parameters())  # two models, and originals
    memory = max([weights + asking.memory, *(each.memory.total for each in trainings)])
    beyond = [name for name, wanted in (("the edits", config.edits), ("the audit", config.audit)) if wanted]
    parts = [
        f"{len(trainings)} trainings, roughly {duration(trained)}",
        f"{len(passages):,} passages at {asked} λ and models, {asked * asking.answers:,} answers, roughly "
        f"{duration(answered)}",
        f"about {memory_size(memory)} of memory",
    ]
    return f"ahead: {'; '.join(parts)}{'; and ' if beyond else ''}{' and '.join(beyond)}"
