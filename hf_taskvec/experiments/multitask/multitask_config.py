"""The settings of the multi-task experiment: one dataclass, every field explained."""

import ast
import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from hf_taskvec.algebra.task_vector import TaskVector
from hf_taskvec.errors import BadValueError, MissingNameError, UnsupportedError, did_you_mean
from hf_taskvec.experiments.config_options import option
from hf_taskvec.experiments.experiment_config import ExperimentConfig
from hf_taskvec.experiments.multitask.rounds import Merge
from hf_taskvec.merging import combine, rules
from hf_taskvec.training.settings import TrainingSettings

# λ is searched between these: the MIMA paper's grids.
BOUNDS = {"sum": (0.0, 1.0), "ties": (0.8, 1.8)}
_OTHERS = (0.0, 2.0)


@dataclass(frozen=True)
class RuleOption:
    """An option for one rule, or for every one that has it (`rule` is empty then)."""

    rule: str
    name: str
    value: Any


def parse_option(text: str) -> RuleOption:
    """An option as it is written on the command line.

    >>> parse_option("ties.density=0.3"), parse_option("normalize=weight")
    (RuleOption(rule='ties', name='density', value=0.3), RuleOption(rule='', name='normalize', value='weight'))
    """
    key, sign, value = text.partition("=")
    rule, _, name = key.strip().rpartition(".")
    if not sign or not name:
        raise BadValueError(f"rule_options: {text!r} is not of the form name=value or rule.name=value.")
    try:
        return RuleOption(rule, name, ast.literal_eval(value.strip()))
    except (ValueError, SyntaxError):
        return RuleOption(rule, name, value.strip())  # a word


@dataclass(frozen=True)
class MultitaskConfig(ExperimentConfig):
    """The settings of `recipes/multitask.py`; its `--help` explains each of them."""

    books: list[str] | None = option(
        None,
        "One text file for each task. The embedded model brings its own. A process reads the files of its own tasks "
        "only.",
    )
    tasks: int = option(4, "How many books the embedded model's library has, at most seven.")

    # The rounds.
    rounds: list[int] = option(
        [1, 2, 4, 8], "Numbers of rounds N to compare, all with the same number of steps; 1 is plain merging."
    )
    steps_per_round: int = option(
        20, "Steps of each task in a round of the largest N. A smaller N has longer rounds, the total is the same."
    )
    merge: str = option("mean", "The rule that ends a round: `mean` is MIMA; `sum` with --merge-scale is ATM.")
    merge_scale: float = option(1.0, "What the merged update of a round is multiplied by.")

    # The last merge.
    final: list[str] = option(
        ["mean", "sum", "ties"],
        "The rules that merge the task models at the end. λ of `mean` is 1, that of the others is searched.",
    )
    density: float = option(0.2, "The share of elements that `ties`, `magnitude`, `breadcrumbs` and `dare` keep.")
    rule_options: list[str] | None = option(
        None,
        "Other options of the rules, as name=value for each rule that has it or rule.name=value for one: gamma=0.02 "
        "ties.density=0.3 schedule=[0,1]. They win over --density. `dare` draws by --seed.",
    )
    search: Literal["grid", "bounded"] = option("grid", "How λ is searched on the validation text.")
    evaluations: int = option(21, "How often a merged model may be evaluated to find its λ.")

    output: str = option("outputs/multitask", "The folder for the report, the plots, the merged model and its vector.")

    def __post_init__(self) -> None:
        if self.embedded and self.books:
            raise BadValueError("the embedded model brings its own books. To use yours, name a --base-model.")
        if not self.embedded and len(self.books or ()) < 2:
            raise BadValueError("give at least two books, one for each task: --books one.txt two.txt three.txt.")
        if self.embedded and not 2 <= self.tasks <= 7:
            raise BadValueError(f"tasks={self.tasks}: the embedded library has 2 to 7 unrelated books.")
        if not self.rounds or min(self.rounds) < 1 or len(set(self.rounds)) != len(self.rounds):
            raise BadValueError(f"rounds={self.rounds} must be different whole numbers of at least 1.")
        if self.steps_per_round < 1:
            raise BadValueError(f"steps_per_round={self.steps_per_round} must be at least 1.")
        for number in self.rounds:
            if self.steps % number:
                raise BadValueError(
                    f"{self.steps} steps ({max(self.rounds)} rounds of {self.steps_per_round}) cannot be divided into "
                    f"{number} equal rounds. Choose numbers that divide the total."
                )
        if not math.isfinite(self.merge_scale) or self.merge_scale == 0.0:
            raise BadValueError(f"merge_scale={self.merge_scale} must be a number other than 0.")
        if not self.final:
            raise BadValueError("no rule is given for the last merge: --final mean.")
        if self.evaluations < 2:
            raise BadValueError(f"evaluations={self.evaluations}: finding λ takes at least 2.")
        self.check()
        if self.search == "bounded" and find_spec("scipy") is None:
            raise UnsupportedError(
                "--search bounded needs scipy: pip install 'hf-taskvec[search]', or use --search grid."
            )
        self._check_rule_options()
        count = self.tasks if self.embedded else len(self.books or ())
        trial = [TaskVector.from_tensors({"w": torch.eye(2)}, name=f"v{number}") for number in range(count)]
        for rule in {self.merge, *self.final}:
            combine(trial, rule, **self.options(rule))
        _ = self.training

    def _check_rule_options(self) -> None:
        """Refuse an option that no rule of this run has."""
        used = {name: found for name, found in rules().items() if name in (self.merge, *self.final)}
        for each in map(parse_option, self.rule_options or ()):
            if each.rule and each.rule not in used:
                hint = did_you_mean(each.rule, used)
                raise MissingNameError(f"rule_options: {each.rule!r} is no rule of this run.{hint}")
            known = {n: None for name, found in used.items() if each.rule in ("", name) for n in found.options}
            if each.name not in known:
                takes = f"They take {', '.join(known)}." if known else "They take no options."
                raise MissingNameError(
                    f"rule_options: no rule of this run has an option {each.name!r}.{did_you_mean(each.name, known)} "
                    f"{takes}"
                )

    @property
    def steps(self) -> int:
        """S: how many steps each task makes, in any number of rounds."""
        return max(self.rounds) * self.steps_per_round

    @property
    def training(self) -> TrainingSettings:
        """How each task is fine-tuned."""
        return self.settings(self.method)

    @property
    def ends_round(self) -> Merge:
        """How the updates of a round are merged."""
        return Merge(self.merge, self.merge_scale, self.options(self.merge))

    def options(self, rule: str) -> dict[str, Any]:
        """What this rule is given."""
        known = rules()[rule].options if rule in rules() else {}
        shared = {"density": self.density, "seed": self.seed}
        # Those for one rule win over those for all.
        given = sorted((parse_option(each) for each in self.rule_options or ()), key=lambda each: each.rule != "")
        mine = {each.name: each.value for each in given if each.rule in ("", rule)}
        return {name: value for name, value in {**shared, **mine}.items() if name in known}

    def bounds(self, rule: str) -> tuple[float, float] | None:
        """Where λ of a rule is searched; None where it is 1."""
        return None if rule == "mean" else BOUNDS.get(rule, _OTHERS)

    def resolved(self, inputs: dict[str, str]) -> dict[str, Any]:
        """All that decides the results, without a path of this machine."""
        return {"inputs": inputs, **self.identity(("base_model", "books"))}
