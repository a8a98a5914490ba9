"""A merging rule, a metric, a protocol and an attack, as another package would add them."""

import torch

from hf_taskvec.auditing.audit_case import AttackResult, AuditCase
from hf_taskvec.auditing.audit_parts import Finding
from hf_taskvec.evaluation import Metric, protocols
from hf_taskvec.merging import Parameter, rule


@rule("strongest", paper="https://example.org/strongest")
def strongest(parameter: Parameter):
    """Of each element, the change that is largest, whatever its sign."""
    weights = [change.weight for change in parameter.changes]

    def pick(tiles, statistics, start):
        stacked = torch.stack([tile * weight for tile, weight in zip(tiles, weights, strict=True)])
        return stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]

    return parameter.computed(pick)


shouting = Metric(
    "shouting",
    "health",
    False,
    "the share of capital letters in the output",
    compute=lambda passage, protocol: sum(map(str.isupper, passage.output)) / max(1, len(passage.output)),
)

short = protocols.Protocol("short", 1, "words", prompt_length=8, answer_length=8, placement="disjoint")


def ask_again(case: AuditCase) -> AttackResult:
    """Asking once more as before: an attack that changes nothing."""
    point = case.judging.point(0, case.seen, case.values)
    return AttackResult((Finding("ask-again", "again", "the same is asked again", (point,), (), 0),))
