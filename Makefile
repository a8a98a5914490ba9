# Everything sets itself up in a new clone: `make demo` and `make test` create .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# One thread for each of the test workers: two torch processes with two threads each crawl on two cores.
WORKERS ?= 2
# Each worker has one run of neighbouring tests, and takes from another's end when it has none left: so what the tests
# of a file share is made by one worker, not by all.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-fuzz test-mergekit test-lowest quality bench clean test-matrix matrix-table docs docs-serve space test-llama-cpp

demo: .venv/ready
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --num_cpu_threads_per_process 2 --mixed_precision no --dynamo_backend no recipes/unlearn.py

test: .venv/ready
	$(PYTEST)

test-slow: .venv/ready
	$(PYTEST) -m slow

test-fuzz: .venv/ready
	$(BIN)/python tests/fuzzing/run.py

# Every model type, class and LoRA option, about an hour; an interrupted run goes on where it was.
test-matrix: .venv/ready
	$(PYTEST) -m matrix tests/matrix

# What test-matrix found becomes tests/matrix/expected.json and docs/coverage.md.
matrix-table: .venv/ready
	$(BIN)/python tests/matrix/make_table.py

# mergekit pins old versions of its dependencies, so it lives in a virtual environment of its own.
test-mergekit: .venv/ready .venv-mergekit/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/merging/test_mergekit_parity.py tests/integrations/test_mergekit.py

# llama.cpp out of the source of the package llama-cpp-python, compiled with cmake: a quarter of an hour, once.
test-llama-cpp: .venv/ready .llama.cpp/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m 'slow or not slow' tests/application/test_gguf_adapter.py

.llama.cpp/ready:
	rm -rf .llama.cpp && mkdir .llama.cpp
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python -d .llama.cpp llama-cpp-python==0.3.36
	tar xzf .llama.cpp/*.tar.gz -C .llama.cpp --strip-components=3 --wildcards '*/vendor/llama.cpp'
	cmake -S .llama.cpp -B .llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_OPENSSL=OFF > .llama.cpp/build.log
	cmake --build .llama.cpp/build -j $(WORKERS) --target llama-debug >> .llama.cpp/build.log
	touch $@

quality: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: .venv/ready .venv-mergekit/ready
	$(BIN)/python tests/benchmarks/bench_apply.py --mergekit .venv-mergekit/bin/python
	$(BIN)/python tests/benchmarks/bench_combine.py --mergekit .venv-mergekit/bin/python

# The documentation as a site, in site/: open site/index.html.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-serve: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

.venv/docs-ready: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# The Space on this machine, with tiny models: open the address that it prints.
space: .venv/space-ready
	$(BIN)/python recipes/space/app.py --play outputs/space

.venv/space-ready: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[plots,space]"
	touch $@

# The lowest version of every range in pyproject.toml, in a virtual environment of its own (gigabytes: torch's own build
# for CUDA), and tests that use all of it; some minutes.
test-lowest: .venv-lowest/ready
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -p no:cacheprovider tests/training/test_finetuning.py \
	  tests/training/test_trainer_callback.py tests/application/test_to_checkpoint.py tests/files/test_vector_format.py \
	  tests/algebra/test_sums.py tests/algebra/test_elementwise.py tests/merging/test_sparse_rules.py \
	  tests/evaluation/test_sweep.py

.venv-lowest/ready: pyproject.toml tests/lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct \
	  -e ".[plots]" -r tests/lowest.txt
	touch $@

.venv-mergekit/ready: constraints.txt
	$(PYTHON) -m venv .venv-mergekit
	.venv-mergekit/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 mergekit==0.1.5
	touch $@

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[plots,test,quality]"
	touch $@

clean:
	rm -rf .venv .venv-mergekit .venv-lowest .llama.cpp outputs
