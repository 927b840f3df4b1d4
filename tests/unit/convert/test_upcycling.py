"""A mixture that is made of a dense model is the same function, as transformers computes both."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.cli.cli import main
from mcore_rl.convert.copying.conversion import CopySettings
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.upcycling import UpcycleOptions, plan_upcycle
from tests.conversion import ONE_FILE, bytes_of, quiet, read_hf, saved
from tests.hf_models import TOLERANCE, Tensors, oracle, random_tokens


def upcycled(source: Path, folder: Path, settings: CopySettings = ONE_FILE, **options: object) -> Path:
    chosen = UpcycleOptions(**{"num_experts": 8, "top_k": 2} | options)  # type: ignore[arg-type]
    with quiet() as progress:
        return convert(plan_upcycle(source, folder, chosen, settings), settings, progress)


def experts(tensors: Tensors, layer: int, role: str) -> list[torch.Tensor]:
    return [tensors[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{role}.weight"] for e in range(8)]


@pytest.mark.matrix("llama-llama3-mixtral-options1")
@pytest.mark.parametrize(
    ("case", "kind", "options"),
    [
        pytest.param("llama", "mixtral", {}, marks=pytest.mark.full),
        ("llama-llama3", "mixtral", {"granularity": 2, "top_k": 4}),
        pytest.param("qwen2", "qwen2_moe", {}, marks=pytest.mark.full),
        ("qwen2", "qwen2_moe", {"granularity": 4, "top_k": 4, "shared": 1}),
        pytest.param("qwen3", "qwen3_moe", {}, marks=pytest.mark.full),
        ("qwen3-yarn", "qwen3_moe", {"granularity": 4, "top_k": 4}),
    ],
)
def test_without_noise_transformers_computes_the_same_logits(
    case: str, kind: str, options: dict[str, int], tmp_path: Path
) -> None:
    source, tokens_BS = saved(case, tmp_path / "dense"), random_tokens()
    out = upcycled(source, tmp_path / "moe", **options)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert model.config.model_type == kind
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(tokens_BS).logits
    torch.testing.assert_close(logits, oracle(case).logits(tokens_BS), atol=TOLERANCE, rtol=0)
    # Megatron's model of it too: an import is compared with transformers before it has its name.
    assert main(["convert", "import", str(out), str(tmp_path / "ckpt"), "--workers", "1"]) == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "changes", "absent"),
    [
        ("llama", {}, ("rope_theta", "rope_parameters")),  # 1e4, and 1e6 in Mixtral
        ("qwen3", {"head_dim": 128}, ("head_dim",)),  # 128, and in Qwen3-MoE what fills the hidden size
    ],
)
def test_a_key_that_the_dense_config_leaves_out_has_the_value_of_the_dense_family(
    case: str, changes: dict[str, int], absent: tuple[str, ...], tmp_path: Path
) -> None:
    source, tokens_BS = saved(case, tmp_path / "dense", **changes), random_tokens()
    config = json.loads((source / "config.json").read_text())
    left = {name: value for name, value in config.items() if name not in absent}
    (source / "config.json").write_text(json.dumps(left))
    both = []
    for folder in (source, upcycled(source, tmp_path / "moe")):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            both.append(model.eval()(tokens_BS).logits)
    torch.testing.assert_close(both[1], both[0], atol=TOLERANCE, rtol=0)


def test_slices_of_a_copy_share_their_row_of_the_router_and_make_up_the_mlp(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "dense")
    options = {"granularity": 2, "router_std": 0.5, "seed": 3}
    made, dense = read_hf(upcycled(source, tmp_path / "moe", **options)), read_hf(source)
    routers = [made[f"model.layers.{i}.block_sparse_moe.gate.weight"] for i in range(3)]
    for router in routers:
        assert torch.equal(router[0::2], router[1::2]) and len(router.unique(dim=0)) == 4
        assert router.std() == pytest.approx(0.5, rel=0.2)
    assert not torch.equal(routers[0], routers[1])
    first, second = experts(made, 1, "w2")[4:6]
    assert torch.equal(torch.cat([first, second], 1), 2 * dense["model.layers.1.mlp.down_proj.weight"])
    first, second = experts(made, 1, "w3")[4:6]
    assert torch.equal(torch.cat([first, second]), dense["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.full
def test_noise_has_the_given_size_in_each_expert_and_no_other_tensor(tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "dense", torch.bfloat16)
    out = upcycled(source, tmp_path / "moe", noise=0.25, seed=1)
    made, dense = read_hf(out), read_hf(source)
    for role, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        weight_RC = dense[f"model.layers.2.mlp.{name}.weight"].float()
        of_row = weight_RC.square().mean(1, keepdim=True).sqrt()
        relative = torch.stack([(expert.float() - weight_RC) / of_row for expert in experts(made, 2, role)]).flatten(1)
        assert relative.std() == pytest.approx(0.25, rel=0.02)
        assert (torch.corrcoef(relative) - torch.eye(8)).abs().max() < 0.1
    same = [name for name in dense if ".mlp." not in name]
    assert len(same) == 3 + 3 * 6 and all(torch.equal(made[name], dense[name]) for name in same)
    again = upcycled(source, tmp_path / "two", CopySettings(workers=2), noise=0.25, seed=1)
    assert bytes_of(again) == bytes_of(out)
    other = read_hf(upcycled(source, tmp_path / "other", noise=0.25, seed=2))
    assert not torch.equal(experts(other, 2, "w1")[0], experts(made, 2, "w1")[0])


@pytest.mark.full
def test_the_command_writes_a_folder_that_checks_and_is_replaced_like_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = saved("qwen3", tmp_path / "dense"), tmp_path / "moe"
    command = ["convert", "upcycle", str(source), str(out), "--experts", "4", "--top-k", "2", "--workers", "1"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "qwen3 -> qwen3_moe: 4 experts a layer, top 2, noise 0" in shown
    assert "logits differ from the dense model's by at most" in shown and "rounding explains" in shown
    assert main(["check", str(out)]) == 0
    assert json.loads((out / "manifest.json").read_text())["options"]["num_experts"] == 4
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert main(command) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert main([*command, "--noise", "0.1", "--dtype", "bf16", "--overwrite"]) == 0
    assert ": the noise" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert main([*command[:3], str(source / "moe"), *command[4:]]) == 2
    assert "lies in the dense model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("mixtral", "--experts 8 --top-k 2", "has 6 experts a layer already (mixtral)"),
        ("mistral", "--experts 8 --top-k 2", "of the family mistral, of which no mixture is known. Known are llama"),
        ("llama", "--experts 8", "needs the experts of a layer"),
        ("llama", "--experts 2 --top-k 4", "--top-k 4 is more than --experts 2"),
        ("llama", "--experts 6 --top-k 3 --granularity 3", "--granularity 3 is no power of two"),
        ("llama", "--experts 8 --top-k 2 --granularity 4", "--top-k 2 is not a multiple of --granularity 4"),
        ("llama", "--experts 6 --top-k 4 --granularity 4", "--experts 6 is not a multiple of --granularity 4"),
        ("llama", "--experts 128 --top-k 128 --granularity 128", "does not divide the width of the MLP, 64"),
        ("llama", "--experts 8 --top-k 2 --shared 1", "a layer of mixtral has none"),
        ("qwen2", "--experts 8 --top-k 2 --shared 0", "a layer of qwen2_moe has one shared expert"),
        ("llama", "--experts 8 --top-k 2 --noise -0.1", "--noise -0.1 and --router-std"),
        ("llama", "--experts 8 --top-k 2 --keys local", "--keys means nothing to convert upcycle"),
    ],
)
def test_wrong_input_is_a_sentence_and_nothing_is_written(
    case: str, options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = saved(case, tmp_path / "source"), tmp_path / "out"
    assert main(["convert", "upcycle", str(source), str(out), *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
