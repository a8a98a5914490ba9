"""Unlearning benchmarks of others, by name: their data sets, prompts, generation settings and metrics.

`load_benchmark` gets the data, `run_benchmark` asks a model, and a `BenchmarkReport` holds every number of every item
beside the published rows. MUSE is Shi et al. 2024 (arXiv 2407.06460), TOFU is Maini et al. 2024 (arXiv 2401.06121).
Where the authors' code and open-unlearning's differ, open-unlearning is followed: its rows are the published ones that
a result is put beside. What differs is said at each definition.
"""
