import os
import shutil
import subprocess
import sys

import pytest

from tests.unit.launch.conftest import ROOT


@pytest.mark.full
def test_an_installed_package_has_its_templates_clusters_and_recipes_and_copies_itself(home, slurm, tmp_path):
    """Not editable, and away from the repository: what a user of `pip install` has."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("mcore_rl", "launch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, env=clean, cwd=tmp_path)
    recipe, cluster = "tiny_moe/pretrain", site / "mcore_rl/shipped/clusters/example_cpu.toml"
    command = [sys.executable, "-P", "-m", "mcore_rl.cli.cli", "launch", recipe, "--cluster", str(cluster)]
    words = ["--nodes", "1", 'data.train=["data/train"]']
    environment = {"PATH": str(slurm.bin), "PYTHONPATH": str(site)}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "101\n"), done.stderr
    copy = slurm.submitted[0].parent / "code"
    assert (copy / "mcore_rl/shipped/job.sh").exists() and (copy / "mcore_rl/programs/pretrain.py").exists()
    assert "installed" in copy.with_name("commit.txt").read_text()
