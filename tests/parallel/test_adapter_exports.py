"""Low-rank adapters compute what the library peft computes with an export of them, and so does a merged export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.config.run import CheckpointConfig, PretrainConfig
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.peft import AdapterLayout, read_peft
from mcore_rl.errors import CheckpointError
from mcore_rl.model.adapters import adapters_off, fill_adapters, merge_loss
from mcore_rl.model.build import local_shards, unwrap
from mcore_rl.model.hf_stream import WeightStream
from mcore_rl.storage.checkpoints.write import load_weights
from tests.conversion import ONE_FILE, adapter_of, exported, imported, read_hf, saved
from tests.hf_models import VOCAB, oracle, random_tokens
from tests.parallel.checkpointing import config_of, opened
from tests.ranks import run_ranks

TOLERANCE = 1e-5
LORA = LoraConfig(rank=6, alpha=9.0, rslora=True, expert_rank=4)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that saved random adapters as step 0, and their gradients in their place as step 1."""

    folder: Path
    base: Path
    config: PretrainConfig
    logits: Tensor
    off: Tensor

    @property
    def adapters(self) -> Path:
        return self.folder / "checkpoints" / "iter_0000000"

    @property
    def gradients(self) -> Path:
        return self.folder / "checkpoints" / "iter_0000001"


def saved_twice(config: PretrainConfig, base: Path) -> tuple[Tensor, Tensor]:
    """On a rank: logits with random adapters over the weights of `base`, and with these off."""
    with opened(config) as run:
        state = run.state
        load_weights(state.chunks, state.mesh, config.model, base)
        for shard in local_shards(state.chunks):
            if ".adapter." in shard.key:
                generator = torch.Generator().manual_seed(len(shard.key))
                whole = 0.1 * torch.randn(shard.global_shape, generator=generator)
                shard.data.detach().copy_(whole[shard.where])
        state.optimizer.reload_model_params()
        run.checkpoints.save()
        chunk = state.chunks[0].eval()
        tokens = random_tokens(length=17)
        inputs = {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": torch.arange(16).expand(len(tokens), -1),
            "attention_mask": None,
        }
        logits = chunk(**inputs)[..., :VOCAB]
        chunk.zero_grad_buffer()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        with torch.no_grad(), adapters_off(state.chunks):
            off = chunk(**inputs)[..., :VOCAB]
        for param in unwrap(chunk).parameters():
            if param.requires_grad:
                param.data.copy_(param.main_grad)
        state.optimizer.reload_model_params()
        state.progress.step = 1
        run.checkpoints.save()
        return logits.detach(), off


def config_for(case: str, run_dir: Path, lora: LoraConfig) -> PretrainConfig:
    model = oracle(case).ours
    moe = model.moe.model_copy(update={"balance": "none", "z_loss_coeff": 0.0})
    model = model.model_copy(update={"vocab_multiple": 16, "moe": moe})
    return config_of(run_dir, model, MeshConfig(), asynchronous=False).model_copy(update={"lora": lora})


def trained(case: str, folder: Path, lora: LoraConfig) -> Trained:
    base = saved(case, folder / "hf")
    config = config_for(case, folder / "run", lora)
    logits, off = run_ranks(saved_twice, 1, config, imported(base, folder / "base"))[0]
    return Trained(folder=folder / "run", base=base, config=config, logits=logits, off=off)


def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=random_tokens(length=17)[:, :-1]).logits
    return logits


def opened_by_transformers(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


CASES: dict[str, tuple[str, LoraConfig, AdapterLayout]] = {
    "fused": ("qwen3_moe", LORA, "fused"),
    "fused-each": ("qwen3_moe", LORA, "each"),
    "split": ("qwen3_moe", LORA.model_copy(update={"expert_gate_up": "split"}), "each"),
    "experts": ("qwen3_moe", LORA.model_copy(update={"targets": ("experts",)}), "fused"),
    "mixtral": ("mixtral", LORA, "each"),
    "latent": ("deepseek_v3", LORA.model_copy(update={"targets": ("attention", "experts")}), "fused"),
    "full-queries": ("deepseek_v3-full-queries", LORA.model_copy(update={"targets": ("attention",)}), "each"),
    "dense": ("qwen3", LORA.model_copy(update={"expert_rank": "auto", "rslora": False}), "each"),
}


@pytest.mark.matrix("split")
@pytest.mark.parametrize("case", CASES)
def test_peft_computes_the_same_logits_and_gradients(case: str, peft: Any, tmp_path: Path) -> None:
    family, lora, layout = CASES[case]
    run = trained(family, tmp_path, lora)
    folder = adapter_of(run.adapters, tmp_path / "adapter", layout)
    base = opened_by_transformers(run.base)
    assert (logits_of(base) - run.off).abs().max() <= TOLERANCE
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    logits = logits_of(model)
    assert (logits - run.logits).abs().max() <= TOLERANCE
    assert (run.logits - run.off).abs().max() > 0.05
    tokens = random_tokens(length=17)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    ours = load_file(adapter_of(run.gradients, tmp_path / "gradients", layout) / "adapter_model.safetensors")
    theirs = {
        name.replace(".default", ""): param.grad for name, param in model.named_parameters() if param.grad is not None
    }
    if case in ("fused-each", "split", "mixtral"):
        return  # peft fuses what it reads, and has other tensors
    assert ours.keys() == theirs.keys()
    errors = {name: (ours[name] - grad).norm() / grad.norm() for name, grad in theirs.items()}
    assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.full
@pytest.mark.parametrize("case", ["fused", "split", "latent", "dense"])
def test_a_merged_export_computes_the_same(case: str, tmp_path: Path) -> None:
    family, lora, _ = CASES[case]
    run = trained(family, tmp_path, lora)
    for mesh_layout in (None, run.base):
        folder = exported(run.adapters, tmp_path / f"merged-{mesh_layout is None}", reference=mesh_layout, merges=True)
        logits = logits_of(opened_by_transformers(folder))
        assert (logits - run.logits).abs().max() <= TOLERANCE
    untouched = read_hf(run.base)
    merged = read_hf(tmp_path / "merged-True")
    assert all(torch.equal(merged[name], untouched[name]) for name in untouched if "norm" in name)


def saved_with_scores(config: PretrainConfig, base: Path) -> Tensor:
    """On a rank: scores `[B, S]` with a random head and random adapters over the weights of `base`, saved as step 0."""
    with opened(config) as run:
        load_weights(run.state.chunks, run.state.mesh, config.model, base)
        for shard in local_shards(run.state.chunks):
            if ".adapter." in shard.key or shard.key == "score.weight":
                whole = 0.1 * torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(len(shard.key)))
                shard.data.detach().copy_(whole[shard.where])
        run.state.optimizer.reload_model_params()
        run.checkpoints.save()
        return scores_of(run.state.chunks[0])


def scores_of(chunk: Any) -> Tensor:
    tokens = random_tokens(length=16)
    positions = torch.arange(16).expand(len(tokens), -1)
    with torch.no_grad():
        scores: Tensor = chunk.eval()(input_ids=tokens, position_ids=positions, attention_mask=None)
    return scores[..., 0]


def scores_with(config: PretrainConfig, base: Path, folder: Path) -> Tensor:
    """On a rank: scores of the weights of `base` with the adapters and the head in a folder of peft."""
    with opened(config) as run:
        load_weights(run.state.chunks, run.state.mesh, config.model, base)
        fill_adapters(run.state.chunks, read_peft(folder, config.lora, config.model))
        return scores_of(run.state.chunks[0])


@pytest.mark.full
@pytest.mark.parametrize(("case", "layout"), [("qwen3", "each"), ("qwen3_moe", "fused")])
def test_peft_gives_the_scores_of_an_exported_reward_model(
    case: str, layout: AdapterLayout, peft: Any, tmp_path: Path
) -> None:
    base = saved(case, tmp_path / "hf", rms_norm_eps=1e-6)
    config = config_for(case, tmp_path / "run", LORA)
    config = config.model_copy(update={"model": config.model.scored})
    checkpoint = imported(base, tmp_path / "base")
    (scores,) = run_ranks(saved_with_scores, 1, config, checkpoint)
    folder = adapter_of(tmp_path / "run/checkpoints/iter_0000000", tmp_path / "adapter", layout)
    settings = peft.PeftConfig.from_pretrained(str(folder))
    assert settings.task_type == "SEQ_CLS" and settings.modules_to_save == ["score"]
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, attn_implementation="eager", dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(plain, folder).eval()
    for row, tokens in enumerate(random_tokens(length=16)):
        theirs = model(input_ids=tokens[None]).logits[0, 0]
        assert (theirs - scores[row, -1]).abs() <= TOLERANCE and theirs.abs() > 1e-3
    # What peft saves of it is read back with its head.
    model.save_pretrained(tmp_path / "again")
    again = config.model_copy(update={"run_dir": str(tmp_path / "of peft")})
    (read,) = run_ranks(scores_with, 1, again, checkpoint, tmp_path / "again")
    assert torch.equal(read, scores)


def streamed(config: PretrainConfig) -> tuple[dict[str, Tensor], float, float]:
    """On a rank: the weights of `checkpoint.load` as servers get them, and what rounding to fp32 and bf16 loses."""
    with opened(config) as run:
        tensors: dict[str, Tensor] = {}
        for bucket in WeightStream(run.state.chunks, run.state.mesh, config.model):
            tensors |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
        losses = [merge_loss(run.state.chunks, dtype) for dtype in (torch.float32, torch.bfloat16)]
        return tensors, losses[0], losses[1]


STREAMED = {
    "fused": MeshConfig(etp=2, dp=2),
    "split": MeshConfig(ep=2, dp=2),
    "latent": MeshConfig(tp=2, ep=2),
    "dense": MeshConfig(pp=2, pp_layout=(1, 2)),
}


@pytest.mark.full
@pytest.mark.parametrize("case", STREAMED)
def test_servers_get_the_merged_weights_of_an_export(case: str, tmp_path: Path) -> None:
    """On every mesh; only the order in which ranks' parts of B A are summed may differ."""
    family, lora, _ = CASES[case]
    run = trained(family, tmp_path, lora)
    expected = read_hf(exported(run.adapters, tmp_path / "merged", merges=True))
    config = run.config.model_copy(
        update={
            "run_dir": str(tmp_path / "mesh"),
            "mesh": STREAMED[case],
            "checkpoint": CheckpointConfig(load=str(run.adapters), asynchronous=False),
        }
    )
    (tensors, exact, rounded), *others = run_ranks(streamed, config.mesh.smallest_world, config)
    assert all(rank[0] == {} and rank[1:] == (exact, rounded) for rank in others)
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected}
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7, msg=name)
    changed = [name for name, tensor in read_hf(run.base).items() if not torch.equal(tensor, expected[name])]
    assert changed and exact < 1e-5 < rounded


def logits_with(config: PretrainConfig, base: Path, folder: Path) -> Tensor:
    """On a rank: logits of the weights of `base` with the adapters in a folder of peft."""
    with opened(config) as run:
        state = run.state
        load_weights(state.chunks, state.mesh, config.model, base)
        fill_adapters(state.chunks, read_peft(folder, config.lora, config.model))
        tokens = random_tokens(length=17)[:, :-1].contiguous()
        with torch.no_grad():
            logits = state.chunks[0].eval()(
                input_ids=tokens, position_ids=torch.arange(16).expand(len(tokens), -1), attention_mask=None
            )
        return logits[..., :VOCAB]


@pytest.mark.full
@pytest.mark.parametrize("case", ["fused", "fused-each", "split", "mixtral", "latent", "dense"])
def test_adapters_of_a_folder_of_peft_are_those_that_were_exported(case: str, tmp_path: Path) -> None:
    family, lora, layout = CASES[case]
    run = trained(family, tmp_path, lora)
    folder = adapter_of(run.adapters, tmp_path / "adapter", layout)
    config = run.config.model_copy(update={"run_dir": str(tmp_path / "again")})
    (logits,) = run_ranks(logits_with, 1, config, tmp_path / "base", folder)
    assert torch.equal(logits, run.logits)


@pytest.mark.full
def test_adapters_that_peft_made_compute_the_same(peft: Any, tmp_path: Path) -> None:
    """With ranks and scales by patterns, and rslora."""
    base = opened_by_transformers(saved("qwen3_moe", tmp_path / "hf"))
    settings = peft.LoraConfig(
        r=6,
        lora_alpha=9,
        use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"experts.gate_up_proj": 4, "experts.down_proj": 4},
    )
    model = peft.get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))
        expected = logits_of(model)
    model.save_pretrained(tmp_path / "peft")
    config = config_for("qwen3_moe", tmp_path / "run", LORA)
    checkpoint = imported(tmp_path / "hf", tmp_path / "base")
    (logits,) = run_ranks(logits_with, 1, config, checkpoint, tmp_path / "peft")
    assert (logits - expected).abs().max() <= TOLERANCE
    for change, fault in (
        ({"alpha": 3.0}, "has rank 6 and the scale 3.67423, 6 and 1.22474 here"),
        ({"targets": ("attention",)}, "belongs to nothing that has an adapter here"),
        ({"expert_rank": 2}, r"has shape \(24, 48\), not 6 x \(2, 48\)"),
    ):
        with pytest.raises(CheckpointError, match=fault):
            read_peft(tmp_path / "peft", LORA.model_copy(update=change), config.model)


@pytest.mark.full
def test_what_an_export_cannot_do_is_refused(tmp_path: Path) -> None:
    run = trained("qwen3_moe", tmp_path, LORA.model_copy(update={"expert_gate_up": "split"}))
    with pytest.raises(CheckpointError, match=r"has low-rank adapters beside its weights\. Export them added"):
        exported(run.adapters, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"share one\. Write a module for each expert: --adapter each"):
        adapter_of(run.adapters, tmp_path / "fused", "fused")
    base = tmp_path / "base"
    with pytest.raises(CheckpointError, match=r"has no low-rank adapters\. Leave out --merge"):
        exported(base, tmp_path / "merged", merges=True)
    with pytest.raises(CheckpointError, match=r"has no low-rank adapters\. Export the model, without --adapter"):
        adapter_of(base, tmp_path / "none", "each")


@pytest.mark.full
def test_what_rounding_loses_of_an_adapter_is_noted(tmp_path: Path) -> None:
    run = trained("qwen3_moe", tmp_path, LORA)
    notes = plan_export(run.adapters, tmp_path / "x", ExportOptions(merges=True, dtype="bf16"), ONE_FILE).notes
    lines = [note for note in notes if "rounding loses" in note]
    assert len(lines) == 4 and lines[0].startswith("decoder.layers.mlp.experts.experts.linear_fc1.weight: the adapter")


def test_adapters_that_are_not_plain_or_not_whole_are_refused(peft: Any, tmp_path: Path) -> None:
    """PiSSA takes the adapters' first values out of the weights: over the base itself they would count twice."""
    model = config_for("qwen3", tmp_path / "run", LORA).model
    lora = LoraConfig(rank=4, alpha=4.0, targets=("attention",))
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    saved("qwen3", tmp_path / "hf")

    def made(folder: Path, **options: Any) -> Path:
        base = opened_by_transformers(tmp_path / "hf")
        settings = peft.LoraConfig(r=4, lora_alpha=4, target_modules=names, **options)
        peft.get_peft_model(base, settings).save_pretrained(folder)
        return folder

    with pytest.raises(CheckpointError, match=r'init_lora_weights="pissa".*path_initial_model'):
        read_peft(made(tmp_path / "pissa", init_lora_weights="pissa"), lora, model)
    folder = made(tmp_path / "plain")
    read_peft(folder, lora, model)
    tensors = load_file(folder / "adapter_model.safetensors")
    of_keys = next(name for name in tensors if name.endswith("k_proj.lora_B.weight"))
    save_file(tensors | {of_keys: tensors[of_keys].repeat(2, 1)}, folder / "adapter_model.safetensors")
    rows = len(tensors[of_keys])
    with pytest.raises(
        CheckpointError, match=rf"k_proj\.lora_B\.weight has shape \({2 * rows}, 4\), not \({rows}, 4\)"
    ):
        read_peft(folder, lora, model)
    save_file(tensors | {of_keys: tensors[of_keys] * torch.inf}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"infinite or NaN:\n.*k_proj\.lora_B\.weight\nTake another copy"):
        read_peft(folder, lora, model)
    cut = (folder / "adapter_model.safetensors").read_bytes()[:-100]
    (folder / "adapter_model.safetensors").write_bytes(cut)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read: .*Copy it again"):
        read_peft(folder, lora, model)
