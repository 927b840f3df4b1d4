"""Programs as a whole: what follows from their configs, and the files that they name."""

import os
from pathlib import Path
from typing import Literal

import pytest

from mcore_rl.checks.inputs import absent_inputs, inputs_of
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import main
from mcore_rl.config.load import load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.preferences import DPOConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, allows_te, te_violations
from tests.tiny_models import TINY

GRPO = Path("tiny_moe/grpo")


def config(*overrides: str) -> RlRunConfig:
    return load_config(RlRunConfig, GRPO, overrides)


def test_the_recipe_has_two_updates_a_rollout_in_rows_that_its_mesh_can_cut() -> None:
    tiny = config()
    assert (tiny.rollout_size, tiny.updates_per_rollout) == (128, 2)
    assert config("rl.update.epochs=3").updates_per_rollout == 6
    cut = config("mesh.cp=2", "rl.prompts.max_tokens=15", "rl.update.max_tokens_per_microbatch=auto")
    assert (cut.longest_sample, cut.packed_multiple, cut.packed_length) == (32, 4, 32)
    in_8_bits = cut.platform.model_copy(update={"fp8": "hybrid", "fp8_recipe": "mxfp8"})
    assert cut.model_copy(update={"platform": in_8_bits}).packed_multiple == 32 * cut.mesh.tp * cut.mesh.cp


def test_paper_values_follow_the_kind_of_loss_and_the_recipes_of_papers() -> None:
    gspo = load_config(RlConfig, None, ["loss.kind=gspo"]).loss
    assert (gspo.clip, gspo.aggregation_in_use) == ((3e-4, 4e-4), "seq_mean_token_mean")
    grpo = load_config(RlConfig, None, ["loss.clip_high=0.28"]).loss
    assert (grpo.clip, grpo.aggregation_in_use) == ((0.2, 0.28), "seq_mean_token_mean")
    dapo, cispo, dr = (load_config(RlRunConfig, Path(f"tiny_moe/{name}")).rl for name in ("dapo", "cispo", "dr_grpo"))
    assert (dapo.loss.clip, dapo.loss.aggregation_in_use, dapo.loss.kl_coeff) == ((0.2, 0.28), "token_mean", 0)
    assert dapo.rollout.dynamic_sampling and dapo.reward.overlong_buffer_tokens
    assert (cispo.loss.kind, cispo.loss.aggregation_in_use) == ("cispo", "token_mean")
    assert (dr.loss.aggregation_in_use, dr.advantage.kind) == ("seq_mean_token_sum_norm", "mean")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_layers_of_transformer_engine_are_refused_by_every_program_before_it_begins(kind: str) -> None:
    program = PROGRAMS[kind]
    with pytest.raises(ConfigError, match=r'"te": TransformerEngine has norms .* Set platform\.layers="torch"'):
        program.checked_ranks(load_config(program.config, None, ["lora.rank=4", "platform.layers=te"]), None)
    assert not load_config(program.config, None, ["lora.rank=4"]).allows_te


def test_transformer_engine_trains_a_policy_without_adapters_that_servers_sample_from() -> None:
    served = ("rl.engine.kind=vllm", "rl.engine.count=2")
    assert config(*served).allows_te and not config().allows_te and not config(*served, "lora.rank=4").allows_te
    assert load_config(SFTConfig, None).allows_te


def test_the_page_says_of_every_family_what_transformer_engine_computes() -> None:
    """The two columns of attention are what its own function answers (tests/te/test_layers.py)."""
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = page.partition("<!-- families by TransformerEngine -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    told = {name: cells for names, *cells in rows for name in names.split(", ")}
    assert told.keys() - {"all others"} < FAMILIES.keys()
    for name in FAMILIES:
        model = TINY[name].model_copy(update={"norm_eps": TINY[name].mla.norm_eps})

        def answer(cp: int, precision: Literal["bf16", "fp32"], model: ModelConfig = model) -> str:
            reasons = te_violations(model, MeshConfig(cp=cp), PlatformConfig(precision=precision))
            return "refused" if any(reasons) else "yes"

        found = [answer(1, "fp32"), answer(2, "bf16"), answer(2, "fp32")]
        assert answer(1, "bf16") == found[0]
        auto = "te" if allows_te(SFTConfig(model=model)) else "torch"
        assert [*found, auto] == told.get(name, told["all others"]), name
    # What is not there in fp32 over context-parallel ranks is not chosen there either.
    in_fp32 = SFTConfig(mesh=MeshConfig(cp=2), platform=PlatformConfig(precision="fp32"))
    assert allows_te(SFTConfig(mesh=MeshConfig(cp=2))) and not allows_te(in_fp32)


def test_teachers_and_texts_that_are_not_there_are_named_with_the_other_files() -> None:
    wanted = {
        "lora.load": "gone/adapters", "rl.reward.model_tokenizer.path": "gone/tokenizer",
        "rl.reward.model_chat_template": "gone/chat.jinja", "rl.reward.server.ca_file": "gone/reward.pem",
        "rl.distill.teacher": "gone/teacher", "rl.distill.teachers.mathematics": "gone/other",
        "rl.distill.tokenizer.path": "gone/big", "rl.ptx.files": "gone/chat.jsonl",
        "rl.ptx.tokens": "gone/books.bin gone/books.idx", "rl.engine.base_model": "gone/base",
        "rl.engine.ca_file": "gone/engine.pem",
    }  # fmt: skip
    # Tokens are named without their endings, and teachers are one table.
    words = [f"{name}={path.partition('.bin')[0]}" for name, path in wanted.items() if ".teachers." not in name]
    words += ["rl.engine.kind=vllm", "rl.reward.model_tokenizer.kind=huggingface"]
    gone = config(*words, 'rl.distill.teachers={mathematics="gone/other", own="self"}')
    inputs = [(name, str(path)) for name, path, _ in inputs_of(gone) if str(path).startswith("gone/")]
    assert inputs == [(name, path) for name, paths in wanted.items() for path in paths.split()]
    sentences = "\n".join(absent_inputs(gone))
    assert all(f"{name} names" in sentences and path in sentences for name, path in inputs)


def test_a_pipe_a_pointer_of_git_lfs_and_a_tokenizer_without_a_template_are_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "tokenizer").mkdir()
    for name in ("chats/1.jsonl", "tokenizer/tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tmp_path / "tokenizer/weights.safetensors").write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    words = [f"data.train=[{tmp_path}/chats]", f"data.valid=[{tmp_path}/pipe.jsonl]", f"run_dir={tmp_path}/run"]
    sft = load_config(SFTConfig, None, [*words, f"data.tokenizer.path={tmp_path}/tokenizer"])
    template, tokenizer, folder, pipe = absent_inputs(sft)
    assert template.startswith(f"{tmp_path}/tokenizer has no chat template")
    assert f"{tmp_path}/tokenizer/tokenizer.json holds no data. It is a pointer of Git LFS" in tokenizer
    assert f"{tmp_path}/chats/1.jsonl holds no data. It is a pointer of Git LFS" in folder
    assert pipe.startswith(f"data.valid names the file {tmp_path}/pipe.jsonl, a pipe or device")


def test_a_reference_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = (f"dpo.reference={tmp_path}/sft", f"run_dir={tmp_path}/run")
    dpo = load_config(DPOConfig, Path("tiny_moe/dpo"), words)
    (sentence,) = (text for text in absent_inputs(dpo) if "dpo.reference" in text)
    assert f"dpo.reference names the checkpoint {tmp_path}/sft, which does not exist" in sentence


def test_unknown_keys_wrong_types_and_a_mesh_that_does_not_divide_are_one_answer():
    wrong = ["optim.lrr=3", "train.steps=abc", "rl.loss.taus=1", "mesh.pp=3"]
    with pytest.raises(ConfigError) as refused:
        PROGRAMS["rl"].checked_config(Path("tiny_moe/grpo"), wrong, None)
    lines = str(refused.value).splitlines()
    beginnings = ("Unknown key optim.lrr", "Unknown key rl.loss.taus", 'train.steps = "abc"', "- model.num_layers=4")
    assert [line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=False)] == [True] * 4
    assert all("which does not exist" in line for line in lines[4:])


WRONG = {
    "sft: a typo, a wrong type, a mesh and no files": (
        ("sft", "a.toml", 'extends = "tiny_moe/sft"\ndata.train = ["no.jsonl"]\n'
         'optim.lrr = 3\ntrain.steps = "abc"\nmesh.pp = 3'),
        ("Unknown key optim.lrr", "Did you mean optim.lr?", 'train.steps = "abc"', "(mesh.pp=3)", "file no.jsonl"),
        (),
    ),
    "sft: a missing model, wrong types, a batch and a missing file": (
        ("sft", "b.toml", 'run_dir = "b"\nmodel.path = "/no/model"\nmodel.num_layers = "x"\ndata.train = ["no.jsonl"]\n'
         "train.global_batch = 7\ntrain.micro_batch = 2"),
        ("model.path=/no/model does not exist", 'model.num_layers = "x"', "train.global_batch=7", "file no.jsonl"),
        ("num_experts", "tokenizer"),
    ),
    "rl: an unknown section, a misspelt choice, a missing file and another on the command line": (
        ("rl", "c.toml", 'extends = "tiny_moe/grpo"\ntrainer.steps = 3\nrl.loss.kind = "grppo"\n'
         'rl.prompts.task = "file"\nrl.prompts.files = ["no.jsonl"]', "data.tokenizer.path=/no/words.model", "mesh.tp"),
        ("Unknown key trainer.steps", "Did you mean train.steps?", 'rl.loss.kind = "grppo"', "file no.jsonl",
         "tokenizer /no/words.model", "'mesh.tp' is not of the form"),
        (),
    ),
    "sft: a missing file to extend, a typo and a wrong type": (
        ("sft", "d.toml", 'extends = "none.toml"\noptim.lrr = 3\noptim.lr = "x"'),
        ("none.toml", "cannot be read", "Unknown key optim.lrr", 'optim.lr = "x"'),
        ("not set", "num_experts"),
    ),
    "dpo: two missing files, a missing reference and a typo": (
        ("dpo", "e.toml", 'extends = "tiny_moe/dpo"\ndpo.reference = "/no/ref"\ndpo.betta = 1\n'
         'data.train = ["1.jsonl", "2.jsonl"]'),
        ("Did you mean dpo.beta?", "/no/ref, which", "file 1.jsonl", "file 2.jsonl"),
        (),
    ),
    "pretrain: typos in the file and on the command line, a number out of range": (
        ("pretrain", "f.toml", 'extends = "tiny_moe/pretrain"\nlr = 3\noptim.schedule = "cosin"',
         "mesh.tpp=2", "train.steps=-1"),
        ("Unknown key lr in", "Unknown key mesh.tpp on", 'optim.schedule = "cosin"', "train.steps = -1"),
        (),
    ),
    "rl: a missing model, whose tokenizer would replace the recipe's": (
        ("rl", "g.toml", 'extends = "tiny_moe/grpo"', "model.path=/no/model", "optim.lr=x", "train.global_batch=7"),
        ("model.path=/no/model does not exist", 'optim.lr = "x"', "train.global_batch=7"),
        ("runs/quickstart", "tokenizer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "present", "absent"), WRONG.values(), ids=WRONG)
def test_all_mistakes_of_a_config_are_one_answer(given, present, absent, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, name, text, *overrides = given
    Path(name).write_text(text)
    assert main([program, name, *overrides]) == 2
    answer = capsys.readouterr().err
    assert [part for part in present if part not in answer] == []
    assert [part for part in absent if part in answer] == []


def test_a_field_of_another_kind_is_not_suggested():
    with pytest.raises(ConfigError, match=r"Unknown key rl\.loss\.tauu") as refused:
        load_config(PROGRAMS["rl"].config, None, ["rl.loss.tauu=1"])
    assert "rl.loss.tau?" not in str(refused.value)  # grpo has none
    with pytest.raises(ConfigError, match=r"Did you mean rl\.loss\.tau\?"):
        load_config(PROGRAMS["rl"].config, None, ["rl.loss.kind=kimi_k2", "rl.loss.tauu=1"])
