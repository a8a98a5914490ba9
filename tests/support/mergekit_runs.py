"""Runs in the Python of an environment that has mergekit: every YAML of a folder, each to a folder of its name.

python mergekit_runs.py YAMLS OUTPUTS
"""

import sys
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge

configs, outputs = map(Path, sys.argv[1:])
options = MergeOptions(allow_crimes=True, copy_tokenizer=False, quiet=True, lora_merge_cache=str(outputs / "cache"))
for path in sorted(configs.glob("*.yaml")):
    config = MergeConfiguration.model_validate(yaml.safe_load(path.read_text()))
    run_merge(config, str(outputs / path.stem), options)
