import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main, run
from mcore_rl.config.recipes import recipes
from mcore_rl.errors import ConfigError
from tests.unit.planning.test_search import searched

ROOT = Path(__file__).parents[3]
H100 = str(ROOT / "launch/clusters/example_h100.toml")
VENV = str(ROOT / "launch/clusters/example_venv.toml")


def lines_of(capsys, *words):
    """Return the lines of a plan with each wrapped line joined again."""
    assert run(["plan", *words]) == 0
    return joined(capsys.readouterr().out)


def joined(text):
    lines, before = [], ""
    for line in text.splitlines():
        is_wrapped = re.match(r" {8}\S", line) and len(before) + len(line.split()[0]) + 1 > 100
        if is_wrapped or re.match(r" {5}[a-zG]", line):  # of a candidate, all that belongs to it
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
        before = line
    return lines


NO_PLAN = {"tiny_moe/lora_study", "tiny_moe/replay_study"}
PROGRAMS_OF = {"any_model/copying_sft": "sft"}


@pytest.mark.matrix("world")
@pytest.mark.parametrize(
    "words", [["--gpus", "64xH100"], ["--cluster", H100, "--world", "8..16"]], ids=["gpus", "world"]
)
def test_every_recipe_is_answered_with_yes_or_no_first_and_lines_that_a_terminal_shows(words, capsys):
    answers = []
    for recipe in recipes():
        program = PROGRAMS_OF.get(recipe.name)
        status = main(["plan", recipe.name, *words, *(("--program", program) if program else ())])
        written = capsys.readouterr()
        lines = written.out.splitlines() + written.err.splitlines()
        assert max(map(len, lines)) <= 100, recipe.name
        if recipe.name not in NO_PLAN:
            answers.append(lines[0].partition(":")[0])
            assert answers[-1] in ("yes", "no"), lines[0]
            assert "--world" in words or (answers[-1] == "yes") is (status == 0), lines[0]
    assert {"yes", "no"} == set(answers)


def test_the_first_line_has_the_number_of_gpus_and_what_is_left(capsys):
    words = ("qwen3_30b_a3b/pretrain", "--cluster", H100)
    answer, _, memory, step, *_ = lines_of(capsys, *words, "--nodes", "2")
    used, room = map(float, re.findall(r"([\d.]+) of ([\d.]+) GiB", memory)[0])
    assert answer == f"yes: pretrain fits on 16 x H100 with at least {room - used:.1f} of 73.6 GiB free on each GPU"
    assert " s (" in step and ") for a batch of 512 sequences: " in step
    assert main(["plan", *words, "--nodes", "1"]) == 2
    wanted = "no: pretrain does not fit on 8 x H100: the fullest GPU needs 78.8 of 73.6 GiB"
    assert joined(capsys.readouterr().out)[0] == wanted
    assert main(["plan", *words, "--nodes", "1", "mesh.ep=16"]) == 2
    assert capsys.readouterr().out == "no: pretrain does not pass the checks on 8 ranks\n"


def test_candidates_are_a_table_of_at_most_80_columns(capsys):
    assert run(["plan", "mixtral_8x7b/sft", "--gpus", "16xH100", "--search"]) == 0
    answer, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(i for i, line in enumerate(lines) if line.split()[:1] == ["#"])
    first = lines[header + 1].split()
    assert lines[header].split() == "# tp pp vpp cp ep GiB GiB free seconds to #1".split()
    assert first[0] == "1" and answer.endswith(f"with at least {first[7]} of 74.0 GiB free on each GPU")
    assert float(first[6]) + float(first[7]) == pytest.approx(74.0, abs=0.11)
    assert "Seconds are of a step: a batch of 128 sequences of up to 8,192 tokens." in lines
    # The fields have no blank inside, so that a shell passes each as one word.
    fields = [word for line in lines if re.match(r" *\d: | {5}\w+\.", line) for word in line.split() if "=" in word]
    assert fields and all(word.count("[") == word.count("]") for word in fields)


def test_a_plan_says_layout_memory_time_and_what_limits_it(capsys):
    lines = lines_of(capsys, "mixtral_8x7b/pretrain", "--cluster", H100, "--nodes", "8")
    _, layout, memory, step, shares, limits, reason, *warnings = lines
    assert layout == "mesh    pp 4 x vpp 8 x dp 16; experts: ep 8, 2 copies; 16 microbatches of 1 x 4,096 tokens"
    # Weights, gradients and optimizer of 1.876e9 parameters, counted with Megatron's modules.
    assert memory.startswith(
        "memory  stage 0 is fullest: 51.0 of 73.6 GiB: lasting 18.7 (weights 3.5, gradients 7.0, optimizer 8.2: exact)"
    )
    assert "(35 chunks alive)" in memory
    assert step.startswith("step    2.") and "tokens/s a GPU" in step
    assert "experts 6" in shares and "host waits 0" in shares and "bubble" in shares
    assert "free matrix products would give" in limits and "published" in reason
    (loads,) = (warning for warning in warnings if "evenly loaded" in warning)
    # 35 chunks of one layer, each with 8192 routed rows of 4096 + 3 x 14336 numbers: 25.2 GiB in the mean.
    assert loads.endswith(
        "1.1x / 1.3x / 2x of the mean would cost 7 / 18 / 42 % of the speed and 2.5 / 7.5 / 25.2 GiB, which does not "
        "fit from 2x on (--imbalance)"
    )


def test_the_load_of_the_fullest_ranks_experts_is_an_input_of_time_and_memory(capsys):
    words = ("mixtral_8x7b/pretrain", "--cluster", H100, "--nodes", "8")
    _, _, memory, step, *lines = lines_of(capsys, *words, "--imbalance", "1.3")
    assert "58.5 of 73.6 GiB: lasting 18.7" in memory and step.startswith("step    3.59 s")
    assert "experts the fullest rank's get 1.3 times the mean of tokens, in time and memory (--imbalance)" in lines
    assert not any("evenly loaded" in line for line in lines)
    with pytest.raises(SystemExit):
        run(["plan", *words, "--imbalance", "0.9"])
    assert "0.9, wanted 1 or more" in capsys.readouterr().err


def test_a_plan_imports_no_torch_and_is_written_as_json(tmp_path):
    words = ["plan", "qwen3_30b_a3b/pretrain", "--cluster", H100, "--nodes", "2", "--json", f"{tmp_path}/plan.json"]
    code = f"import sys; from mcore_rl.cli.cli import run; run({words!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["version"], plan["world"], plan["fits"]) == (1, 16, True)
    assert plan["step"]["span"]["low"] < plan["step"]["span"]["likely"] < plan["step"]["span"]["high"]


@pytest.mark.full
def test_what_does_not_fit_is_refused_with_the_nearest_meshes_that_do(capsys):
    # With whole logits no mesh of one node has room for the routes.
    of_recipe = ["plan", "qwen3_30b_a3b/grpo_r2", "--cluster", H100, "--nodes", "1"]
    of_recipe.append("platform.logits_chunk_tokens=none")
    with pytest.raises(ConfigError) as raised:
        run(of_recipe)
    assert "needs 82.3 of 73.6 GiB" in capsys.readouterr().out
    assert "\n  1: optim.offload_fraction=1.0\n" in str(raised.value)
    assert "the processor updates the weights" in str(raised.value)
    pinned = "replay.store=pinned"
    with pytest.raises(ConfigError) as raised:
        run([*of_recipe, pinned])
    shown = capsys.readouterr().out
    assert "needs 80.4 of 73.6 GiB" in shown and "main memory for routes (replay.store): 15.0" in shown
    assert "nearest that pass the checks and fit" in str(raised.value)
    assert "\n  1: optim.offload_fraction=1.0\n" in str(raised.value)
    words = ("qwen3_30b_a3b/grpo_r2", "--cluster", H100, "--nodes", "1", pinned, "mesh.pp=2", "mesh.ep=4")
    assert "update" in lines_of(capsys, *words)[4]


@pytest.mark.full
def test_a_mesh_that_the_checks_refuse_is_answered_by_one_that_they_accept():
    with pytest.raises(ConfigError, match=r"(?s)num_experts=128 is not a multiple of mesh.ep=6.*\n  1: mesh.ep=[48]\n"):
        words = ["plan", "qwen3_30b_a3b/pretrain", "mesh.ep=6", "--cluster", H100, "--nodes", "3"]
        run([*words, "train.global_batch=480"])


@pytest.mark.full
def test_a_search_lists_layouts_with_what_they_give_up_and_the_fields_to_set(capsys):
    words = ("qwen3_30b_a3b/pretrain", "--cluster", H100, "--nodes", "2", "--search")
    answer, first, _, narrow, *lines = lines_of(capsys, *words)
    assert answer.startswith("yes: ") and first.startswith("2,940 combinations")
    assert narrow == "102 of them leave less than 4% of the device's memory, and are left out."
    table = lines.index(next(line for line in lines if line.split()[:1] == ["#"]))
    rows, choices = lines[table + 1 : table + 9], lines[table + 9 :]
    assert len(choices) == 8 and all("=" in line for line in choices) and any("recomputes" in line for line in choices)
    assert [row.split()[0] for row in rows] == [str(i) for i in range(1, 9)] and any("+0%" not in row for row in rows)


def test_a_rank_of_adapters_is_a_field_of_the_config(capsys):
    words = ("qwen3_30b_a3b/grpo_r2", "--cluster", H100, "--nodes", "1")
    lines = lines_of(capsys, *words, "--lora-rank", "16")
    assert lines == lines_of(capsys, *words, "lora.rank=16")
    assert "gradients 0.1, optimizer 0.2" in lines[2] and "adapters of qwen3_moe on H100" in lines[6]
    assert main(["plan", "--calibrate", "runs/x", "--cluster", H100, "--lora-rank", "16"]) == 2
    assert "--lora-rank is of a CONFIG" in capsys.readouterr().err


def test_a_table_of_worlds_says_from_where_a_mesh_fits(capsys):
    lines = lines_of(capsys, "qwen3_30b_a3b/pretrain", "--cluster", H100, "--world", "8..64")
    assert lines[0].startswith("yes: pretrain fits on 16 x H100 with") and lines[0].endswith("; on 3 of 4 sizes")
    assert lines[1] == "A step is a batch of 512 sequences of up to 4,096 tokens."
    rows = [line.split()[:3] for line in lines[3:]]
    assert [(ranks, fits) for ranks, _, fits in rows] == [("8", "no"), ("16", "yes"), ("32", "yes"), ("64", "yes")]
    # Of 12 bytes a weight, each doubling takes away a half of the rest: a rank has 3.63e9 weights of experts.
    gib = [float(row[1]) for row in rows]
    assert gib[0] - gib[1] == pytest.approx(2 * (gib[1] - gib[2]), abs=0.2)
    assert lines[3].endswith("hours")


def test_a_table_of_worlds_takes_gpus_and_says_where_more_do_not_help(capsys):
    words = ("tiny_moe/pretrain", "platform.device=cuda", "train.global_batch=64")
    _, _, _, *lines = lines_of(capsys, *words, "--gpus", "8xH100", "--world", "1..64")
    seconds = {int(line.split()[0]): float(line.split()[3]) for line in lines if " yes " in line}
    told = {int(line.split()[0]): int(line.split()[7].rstrip("%")) for line in lines if "hardly help" in line}
    shares = {world: 100 * time_s / seconds[world // 2] for world, time_s in seconds.items() if world // 2 in seconds}
    assert told == {world: pytest.approx(share, abs=1) for world, share in shares.items() if share > 60} != shares


@pytest.mark.full
def test_a_mesh_within_a_node_comes_first_among_those_that_are_alike():
    found = searched("deepseek_v3/pretrain", 256)
    spans = [max(one.mesh.tp * one.mesh.cp, one.mesh.ep * one.mesh.etp) > 8 for one in found.shortlist()]
    assert spans == sorted(spans) and len(set(spans)) == 2


def test_a_table_of_worlds_has_the_phases_and_the_whole_step_of_reinforcement_learning(capsys):
    words = ("qwen3_30b_a3b/grpo_r2", "--cluster", H100)
    _, bound, names, *rows = lines_of(capsys, *words, "--world", "8..16")
    assert bound.endswith("seconds of a whole step are lower bounds")
    assert names.split()[:5] == ["ranks", "rollout", "scoring", "update", "fits"]
    plan = "\n".join(lines_of(capsys, *words, "--nodes", "2"))
    ranks, *phases, fits, rollout, train, whole = rows[1].split("at least")[0].split()
    assert [row.split()[4] for row in rows] == ["no", fits] == ["no", "yes"]
    # The fullest phase is what the plan of this size has, and the parts are those of its bound.
    assert f"{max(phases, key=float)} of 73.6 GiB" in plan and ranks == "16"
    assert f"rl step at least {whole} s: rollout {rollout}, logprobs" in plan
    rollout, train, whole = (float(value.replace(",", "")) for value in (rollout, train, whole))
    assert rollout + train == pytest.approx(whole, abs=2)
    served = ("rl.engine.kind=vllm", "rl.engine.urls=[http://a:1]")
    lines = lines_of(capsys, *words, *served, "--server-nodes", "2", "--world", "16..16")
    assert "servers on 16 GPUs beside them" in lines[1]
    # Without a number of servers there is memory alone.
    assert len(lines_of(capsys, *words, *served, "--world", "16..16")[3].split()) == 5


@pytest.mark.full
def test_a_search_of_reinforcement_learning_lists_its_parts_and_phases(capsys):
    lines = lines_of(capsys, "qwen3_30b_a3b/grpo_r2", "--cluster", H100, "--nodes", "2", "--search")
    assert "Seconds are of a whole step, a lower bound: 4,096 completions by the engine on" in lines
    first = next(line for line in lines if line.startswith("  1: "))
    assert "seconds: rollout " in first and "updates " in first and "GiB by phase: rollout " in first


def test_one_rank_is_described_with_its_groups_layers_and_experts(capsys):
    lines = lines_of(capsys, "qwen3_30b_a3b/pretrain", "mesh.pp=2", "--cluster", H100, "--nodes", "4", "--rank", "21")
    assert lines[1] == "rank 21 on node 2: tp 1 cp 0 dp 2 pp 1 etp 0 ep 5 copy 0"
    assert "group   dp: 8 ranks over 2 nodes: 17, 19, 21, 23, 25, 27, 29, 31" in lines
    assert "layers  24-47" in lines and "experts 80-95 of each MoE layer" in lines


def test_a_cluster_without_a_device_still_gets_memory_and_schedule(capsys):
    lines = lines_of(capsys, "qwen3_30b_a3b/pretrain", "--cluster", H100, "--nodes", "2")
    bare = ROOT / "launch/clusters/example_cpu.toml"
    words = ["tiny_moe/pretrain", "mesh.tp=1", "mesh.pp=2"]
    plain = lines_of(capsys, *words, "--cluster", str(bare), "--nodes", "1")
    assert any(line.startswith("step") for line in lines)
    assert "time    not planned: node.device is not set" in plain
    # 2 microbatches on 2 equal stages: (pp - 1) / (m + pp - 1).
    assert "bubble  33.3% of the schedule, if a backward pass takes twice a forward pass" in plain


@pytest.mark.full
def test_what_fits_on_no_mesh_is_answered_by_state_of_the_optimizer_in_main_memory(capsys):
    words = ["qwen3_30b_a3b/ppo", "--cluster", H100, "--nodes", "1"]
    with pytest.raises(ConfigError) as raised:
        run(["plan", *words])
    _, *fields = next(line for line in str(raised.value).splitlines() if "critic.optim" in line).split()
    assert {"optim.offload_fraction=1.0", "rl.advantage.critic.optim.offload_fraction=1.0"} <= set(fields)
    capsys.readouterr()
    memory = next(line for line in lines_of(capsys, *words, *fields) if "main memory for the optimizer" in line)
    # 16 bytes for each weight of two models, of which one has a scalar in the place of 151,936 logits.
    experts, layer = (48 * 128 * 3 * 2048 * 768, 48 * (2 * 2048 * (4096 + 512) + 2 * 2048 + 2 * 128 + 128 * 2048))
    weights = 2 * (experts + layer + 2048 * (151936 + 1)) + 2048 * 151936
    assert int(memory.split()[-4].replace(",", "")) == pytest.approx(weights * 16 / 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1", "--json", "/dev/null/plan.json"], "--json /dev/null/plan.json cannot be written"),
        (["--nodes", "1", "--json", "."], "output . is a folder, and a file is written"),
        (["--nodes", "1", "--output", "x.toml"], "--output x.toml is written only with --calibrate"),
        (["--nodes", "1", "--search", "--json", "x.json"], "--json x.json is written only of one CONFIG"),
        (["--nodes", str(10**12)], "a plan is of at most 1000000"),
        (["--world", f"8..{10**12}"], "a plan is of at most 1000000"),
    ],
)
def test_what_it_cannot_write_or_count_is_refused(words, message, capsys):
    assert main(["plan", "tiny_moe/pretrain", "--cluster", H100, *words]) == 2
    assert message in capsys.readouterr().err
