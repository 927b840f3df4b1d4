import json
from pathlib import Path

from mcore_rl.cli.cli import run

CPU = str(Path(__file__).parents[3] / "launch/clusters/example_cpu.toml")


def test_a_plan_is_checked_with_megatrons_modules_and_its_own_schedule(capsys, tmp_path):
    words = ["tiny_moe/pretrain", "mesh.tp=1", "mesh.pp=2", "mesh.vpp=2", "--cluster", CPU, "--nodes", "1"]
    files = ["--json", f"{tmp_path}/plan.json", "--timeline", f"{tmp_path}/step.svg"]
    assert run(["plan", *words, "--exact", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, last = (line for line in lines if line.startswith("        rank "))
    assert first.startswith("        rank 0, stage 0: ") and last.startswith("        rank 2, stage 1: ")
    # The first of two data-parallel ranks has the gaps in the other's half.
    assert "the closed form has 512 B more for optimizer; not in it: gaps of 128 numbers" in first
    assert "the closed form is equal to the byte; not in it: gaps of 128 numbers" in last
    assert "recorded on 2 stages with 2 microbatches: every message reaches" in "\n".join(lines)
    assert "        all passes come in the planned order" in lines
    # (pp - 1) / (m vpp + pp - 1), as messages take no time where no device is known.
    assert lines[-1].endswith(
        "idle 20.0% of the busiest stage's time; the plan has 15 layers' forward passes, 20.0%"
    )
    written = json.loads((tmp_path / "plan.json").read_text())["exact"]
    assert [rank["stage"] for rank in written["ranks"]] == [0, 1]
    assert written["schedule"]["as_planned"] and written["schedule"]["chunks_alive"] == [4, 3]
    assert "microbatches, time in layers' forward passes, recorded<" in (tmp_path / "step.svg").read_text()


def test_what_waits_in_main_memory_is_counted_and_what_is_not_built_is_named(capsys):
    words = ["tiny_moe/ppo", "rl.advantage.critic.store=host", "rl.update.store=host", "replay.kind=r2"]
    words += ["--cluster", CPU, "--nodes", "1", "--exact", "--rank", "0"]
    assert run(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    (rank,) = (line for line in lines if line.startswith("        rank 0, stage 0: "))
    assert ", main memory " in rank and "the closed form is equal to the byte" in rank
    (planned,) = (
        line for line in lines if line.startswith("        not built, as planned on the fullest stage: ")
    )
    assert "the rollout's cache (" in planned and "routes and router scores" in planned
