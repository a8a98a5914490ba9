"""Fuzz every file that the package reads, and tell how it went.

python tests/fuzzing/run.py                                    # 100,000 cases over all targets
python tests/fuzzing/run.py --target report --cases 5000       # many of one
python tests/fuzzing/run.py --target report --case 123         # that one case again
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="only those whose name contains this")
    parser.add_argument("--cases", type=int, default=100_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, of each target")
    options = parser.parse_args()
    from support.hub_server import HubServer

    hub = HubServer().start()  # before anything imports huggingface_hub: names in changed files are asked for there
    os.environ.update(hub.environment())
    try:
        return _run(options)
    finally:
        hub.stop()


def _run(options: argparse.Namespace) -> int:
    import torch
    from fuzzing.registry import TARGETS
    from fuzzing.runner import Fault, Fuzzer

    torch.set_num_threads(1)
    chosen = [target for target in TARGETS if (options.target or "") in target.name]
    whole = sum(target.share for target in chosen)
    cases, faults = 0, 0
    for target in chosen:
        with tempfile.TemporaryDirectory() as folder:
            fuzzer = Fuzzer(target, Path(folder))
            count = 1 if options.case is not None else max(1, round(options.cases * target.share / whole))
            outcome = fuzzer.run(count, options.seed, options.case or 0)
        print(outcome, flush=True)
        cases, faults = cases + outcome.cases, faults + len(outcome.faults)
        alike: dict[str, list[Fault]] = defaultdict(list)
        for fault in outcome.faults:
            alike[fault.problem[:40]].append(fault)
        for found in alike.values():
            print(f"  {len(found)} like {found[0]}")
    print(f"{cases} cases, {faults} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
