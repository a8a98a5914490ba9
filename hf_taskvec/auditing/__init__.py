"""Whether a book is really forgotten: a sceptic's attacks on an edited model, beside two other models.

Every attack is made on the edited model, on the untouched one and on a reference that never saw the book, with the
same seeds and the same budget. Without the attacked reference, relearning would only measure learning.

- `attacks/`: one module an attack. Each knows models and passages, and nothing of verdicts.
- `attacked_models`: the three models, asked in the same way, and the verdict on one of them between the other two.
- `audit_case`: what every attack starts from, and what it gives back.
- `audit_steps`: each kind of attack on all three, as a function from the one to the other.
- `audit_run`: the table of the attacks, and all of it, `audit(model, change, books, reference=…)`.
- `audit_parts`, `audit_report`, `audit_words`, `audit_plots`: what came back, as a value, a page and plots.
- `robustness`: how far an attack moved a score, in the two forms of the literature.

The public names are listed here and imported when first used.

    from hf_taskvec.auditing import audit

    report = audit(model, -0.6 * vector, books, reference=retrained, output="out/")
    print(report.sentence)
"""

from typing import TYPE_CHECKING

from hf_taskvec.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_taskvec.auditing.attacks.relearning import Relearning
    from hf_taskvec.auditing.audit_parts import ATTACKS
    from hf_taskvec.auditing.audit_report import AuditReport
    from hf_taskvec.auditing.audit_run import audit

_HOMES = {
    "ATTACKS": "audit_parts",
    "AuditReport": "audit_report",
    "Relearning": "attacks.relearning",
    "audit": "audit_run",
}

__all__ = ["ATTACKS", "AuditReport", "Relearning", "audit"]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
