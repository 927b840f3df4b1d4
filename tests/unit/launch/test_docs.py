import re
import subprocess
import sys

from mcore_rl.cli.cli import parser_of
from mcore_rl.config.load import load_config
from mcore_rl.config.pipeline import PipelineConfig
from mcore_rl.config.recipes import recipe_files
from tests.unit.launch.conftest import ROOT

PAGE = (ROOT / "docs/slurm.md").read_text()


def test_the_tables_of_fields_are_those_of_the_docstrings():
    command = [sys.executable, str(ROOT / "tools/document_fields.py"), "--check"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_pipeline_on_the_page_names_recipes_that_are_there(tmp_path):
    text = re.search("```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "pipeline.toml").write_text(text)
    stages = dict(load_config(PipelineConfig, tmp_path / "pipeline.toml").stages)
    assert list(stages) == ["pretrain", "sft", "convert", "rl"]
    assert all(stages[name].config in recipe_files() for name in ("pretrain", "sft", "rl"))


def test_every_option_of_launch_is_on_the_page():
    options = re.findall(r"--[a-z-]+", parser_of("launch").format_help())
    assert {option for option in options if option not in PAGE} <= {"--help"}
