"""A config.json of any transformers version gives our config; what Megatron has otherwise is refused by name."""

import copy
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import transformers

from mcore_rl import families
from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import IndexerConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES
from mcore_rl.families.config_json import KINDS, check_types
from tests.hf_models import CASES, PUBLISHED, oracle
from tests.unit.convert.test_shells import CLASSES, whole


def test_the_published_config_of_deepseek_v3() -> None:
    assert checked_model_from_hf(PUBLISHED["DeepSeek-V3"]) == ModelConfig(
        family="deepseek_v3",
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=56,
        ffn_hidden_size=18432,
        vocab_size=129280,
        max_position=163840,
        mtp_layers=1,
        rope=RopeConfig(scaling="yarn", factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
        mla=MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(
            num_experts=256, top_k=8, ffn_hidden_size=2048, shared_experts=1, first_dense_layers=3, num_groups=8,
            top_groups=4, routed_scaling=2.5, balance="none", expert_bias=True,
        ),
    )  # fmt: skip


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 4 writes it."""
    stretched = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", "num_local_experts")}
    experts = {"num_local_experts" if config["model_type"] == "mixtral" else "num_experts": None}
    if "num_local_experts" in config:
        experts = dict.fromkeys(experts, config["num_local_experts"])
    return (
        old
        | {key: value for key, value in experts.items() if value}
        | {
            "rope_theta": config["rope_parameters"]["rope_theta"],
            "rope_scaling": None if stretched["rope_type"] == "default" else stretched,
            "torch_dtype": config["dtype"],
        }
    )


@pytest.mark.parametrize("case", CASES)
def test_old_and_new_keys_mean_the_same(case: str) -> None:
    new = oracle(case).config
    assert "rope_parameters" in new
    assert checked_model_from_hf(as_transformers_4(new)) == checked_model_from_hf(new)


OTHER_ROPES: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "factor"),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 77.0}}, "rope_scaling.rope_theta=77.0"),
    ({"rope_theta": 77.0}, "contradicts itself: rope_theta=77.0"),
    ({"partial_rotary_factor": 0.25}, "contradicts itself: partial_rotary_factor=0.25"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_old_and_new_keys_that_contradict_each_other_are_refused(family: str) -> None:
    config = oracle(family).config
    settings = config["rope_parameters"] | {"partial_rotary_factor": 1.0}
    for other, message in OTHER_ROPES:
        with pytest.raises(ConfigError, match="contradicts itself") as refused:
            checked_model_from_hf(config | {"rope_parameters": settings} | other)
        assert message in str(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_positions_may_be_given_by_old_and_new_keys_that_agree(case: str) -> None:
    new = oracle(case).config
    assert checked_model_from_hf(as_transformers_4(new) | new) == checked_model_from_hf(new)


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-yarn", {"rope_parameters": {"rope_type": "yarn", "type": "llama3", "factor": 4.0}}, "type='llama3'"),
    ("qwen3-yarn", {"original_max_position_embeddings": 17}, "original_max_position_embeddings=17"),
    ("qwen3_moe", {"num_experts": 7}, "num_experts=7 beside num_local_experts=6"),
    ("deepseek_v3", {"num_mtp_layers": 1, "num_nextn_predict_layers": 2}, "num_mtp_layers=1"),
    ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok=2 beside experts_per_token=3"),
]


@pytest.mark.parametrize(("case", "change", "message"), CONTRADICTIONS, ids=[m for *_, m in CONTRADICTIONS])
def test_two_names_of_one_setting_with_two_values_are_refused(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"contradicts itself: .*{message}"):
        checked_model_from_hf(oracle(case).config | change)


READ_INSIDE = ("rope_parameters", "rope_scaling", "text_config")


def as_transformers_reads(config: dict[str, Any]) -> dict[str, Any]:
    """The config with all defaults of transformers' class."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    return kind.from_dict(copy.deepcopy(config)).to_dict()  # type: ignore[no-any-return]


def without_one_key(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each key, and the config without it."""
    for key, value in config.items():
        if key == "model_type":
            continue
        yield key, {name: other for name, other in config.items() if name != key}
        if key in READ_INSIDE and isinstance(value, dict):
            for name, inner in without_one_key(value):
                yield f"{key}.{name}", config | {key: inner}


def read(config: dict[str, Any]) -> ModelConfig | None:
    """Our config without MTP layers, which transformers' models do not have; None if it is refused."""
    try:
        return checked_model_from_hf(config).model_copy(update={"mtp_layers": 0})
    except ConfigError:
        return None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full) if case in CLASSES or "-" in case else case
        for case in (*CASES, *CLASSES)
    ],
)
def test_an_absent_key_has_transformers_default_or_is_refused(case: str) -> None:
    config = (oracle(case) if case in CASES else whole(case)).config
    compared = 0
    for form in (config, as_transformers_4(config)) if case in CASES else (config,):
        for key, changed in without_one_key(form):
            ours = read(changed)
            if ours is not None:
                compared += 1
                assert ours == read(as_transformers_reads(changed)), key
    assert compared > 10


SOURCES = Path(families.__file__).parent
OR_A_DEFAULT = re.compile(r'\.get\("(\w+)"\) or (?!0|None)')
DEFAULTED = sorted({key for file in SOURCES.glob("*.py") for key in OR_A_DEFAULT.findall(file.read_text())} & {*KINDS})


@pytest.mark.parametrize("key", [*DEFAULTED, "q_lora_rank"])
def test_zero_is_not_taken_for_an_absent_value(key: str) -> None:
    """Each key for which a family reads null as a default: `config.get(key) or default` would do so with 0 too."""
    if key not in ("index_topk_freq", "intermediate_size"):  # transformers takes 0 for 1; a width that nothing has
        with pytest.raises(ConfigError, match=f"config.json has {key}=0"):
            check_types({key: 0}, KINDS)
    assert {"routed_scaling_factor", "n_group", "head_dim", "beta_fast", "rope_theta"} <= {*DEFAULTED}


ABSENT = object()
READ: list[tuple[str, dict[str, Any], str, object]] = [
    ("mixtral", {"rope_parameters": ABSENT}, "rope.theta", 1e6),
    ("glm4_moe", {"rope_parameters": ABSENT}, "rope.fraction", 0.5),
    ("qwen3", {"head_dim": ABSENT}, "head_dim", 128),
    ("deepseek_v3", {"model_type": "kimi_k2"}, "family", "deepseek_v3"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "moe.first_dense_layers", 2),
    ("qwen3_moe", {"decoder_sparse_step": 3}, "moe.first_dense_layers", 2),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}, "moe.num_groups", None),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}, "moe.top_groups", None),
    ("dots1", {"n_group": ABSENT, "topk_group": ABSENT}, "moe.num_groups", None),
    ("solar_open", {"n_group": ABSENT, "topk_group": ABSENT}, "moe.num_groups", None),
    ("dots1", {"scoring_func": "noaux_tc"}, "moe.expert_bias", True),
    ("dots1", {"scoring_func": "sigmoid"}, "moe.expert_bias", True),
    ("gpt_oss", {}, "sliding_window", 7),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "sliding_window", None),
    ("mistral", {"sliding_window": 256}, "sliding_window", None),  # as long as the context
    ("seed_oss", {}, "attention_dropout", 0.1),
    ("seed_oss", {"residual_dropout": 0.2}, "hidden_dropout", 0.2),
]


@pytest.mark.parametrize(("case", "change", "field", "value"), READ)
def test_a_setting_is_read_from_its_key_or_is_the_familys_default(
    case: str, change: dict[str, Any], field: str, value: object
) -> None:
    config = {key: new for key, new in (oracle(case).config | change).items() if new is not ABSENT}
    assert attrgetter(field)(checked_model_from_hf(config)) == value


def test_the_published_config_of_gpt_oss() -> None:
    assert checked_model_from_hf(PUBLISHED["gpt-oss-20b"]) == ModelConfig(
        family="gpt_oss",
        num_layers=24,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn_hidden_size=2880,
        vocab_size=201088,
        max_position=131072,
        norm_eps=1e-5,
        sliding_window=128,
        rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_length=4096, truncate=False),
        moe=MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=2880, aux_loss_coeff=0.9),
    )


def test_the_published_config_of_minimax_m2_which_counts_mtp_modules_that_its_folder_has_not() -> None:
    assert checked_model_from_hf(PUBLISHED["MiniMax-M2"]) == ModelConfig(
        family="minimax_m2",
        num_layers=62,
        hidden_size=3072,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=1536,
        vocab_size=200064,
        max_position=196608,
        rope=RopeConfig(theta=5e6, fraction=0.5),
        moe=MoEConfig(num_experts=256, top_k=8, ffn_hidden_size=1536, balance="none", expert_bias=True),
    )


LONGER = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "GLM-4.5-Air", "MiniMax-M2"])
def test_a_published_config_with_yarn_as_its_card_adds_it_turns_the_same_part_of_a_head(name: str) -> None:
    config = PUBLISHED[name]
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    plain = checked_model_from_hf(config)
    stretched = {"scaling": "yarn", "factor": 4.0, "original_length": 262144}
    wanted = plain.model_copy(update={"rope": plain.rope.model_copy(update=stretched)})
    assert plain.rope.fraction < 1
    assert checked_model_from_hf(config | {key: (config.get(key) or {}) | LONGER}) == wanted


def test_the_published_config_of_glm_4_7_flash_and_its_dense_layers_by_either_key() -> None:
    model = ModelConfig(
        family="glm4_moe_lite",
        num_layers=47,
        hidden_size=2048,
        num_heads=20,
        num_kv_heads=20,
        head_dim=102,
        ffn_hidden_size=10240,
        vocab_size=154880,
        max_position=202752,
        norm_eps=1e-5,
        mtp_layers=1,
        rope=RopeConfig(theta=1e6),
        mla=MLAConfig(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
        moe=MoEConfig(
            num_experts=64, top_k=4, ffn_hidden_size=1536, shared_experts=1, first_dense_layers=1, routed_scaling=1.8,
            balance="none", expert_bias=True,
        ),
    )  # fmt: skip
    assert checked_model_from_hf(PUBLISHED["GLM-4.7-Flash"]) == model
    types = ["dense"] + ["sparse"] * 46
    by_types = {**PUBLISHED["GLM-4.7-Flash"], "first_k_dense_replace": None, "mlp_layer_types": types}
    assert checked_model_from_hf(by_types) == model


def test_the_published_config_of_glm_5() -> None:
    model = checked_model_from_hf(PUBLISHED["GLM-5"])
    assert model.indexer == IndexerConfig(top_k=2048, heads=32, width=128)
    assert (model.moe.first_dense_layers, model.mtp_layers, model.rope.theta) == (3, 1, 1e6)
    assert model.mla == MLAConfig(
        q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256
    )


def test_layers_of_glm_5_2_that_share_a_choice_by_a_list_a_pattern_or_numbers() -> None:
    """As published: 21 of 78 layers have an indexer."""
    full = {0, 1, *range(2, 78, 4)}
    shared = tuple(layer for layer in range(78) if layer not in full)
    ways: list[dict[str, Any]] = [
        {"indexer_types": ["full" if layer in full else "shared" for layer in range(78)]},
        {"index_topk_pattern": "".join("F" if layer in full else "S" for layer in range(78))},
        {"index_topk_pattern": ["full" if layer in full else "shared" for layer in range(78)]},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None},
    ]
    for way in ways:
        model = checked_model_from_hf(PUBLISHED["GLM-5"] | way)
        assert model.indexer.shared_layers == shared
        assert transformers.GlmMoeDsaConfig(**PUBLISHED["GLM-5"] | way).indexer_types == [
            "shared" if layer in shared else "full" for layer in range(78)
        ]


def test_deepseek_v3_2_is_deepseek_v3_with_indexers() -> None:
    plain = checked_model_from_hf(PUBLISHED["DeepSeek-V3"])
    published = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    indexer = IndexerConfig(top_k=2048, heads=64, width=128)
    wanted = plain.model_copy(update={"family": "deepseek_v32", "indexer": indexer})
    assert checked_model_from_hf(PUBLISHED["DeepSeek-V3"] | published) == wanted


YARN = PUBLISHED["DeepSeek-V3"]["rope_scaling"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "same positions in all layers"),
    ("llama", {"rope_parameters": {"factor": 8.0}}, "factor=8.0"),
    ("gpt_oss", {"rope_parameters": None}, "lacks rope_parameters"),
    ("llama-llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ("qwen3-yarn", {"rope_parameters": {"rope_type": "yarn"}}, "lacks factor"),
    ("llama", {"model_type": "gpt2"}, "model_type='gpt2'.*Known are deepseek_v2"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"hidden_size": None}, "lacks hidden_size"),
    ("llama", {"num_hidden_layers": "three"}, "num_hidden_layers='three'; wanted a whole number"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("llama-llama3", {"original_max_position_embeddings": 4096}, "original_max_position_embeddings=4096"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}, "decoder_sparse_step=2"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("olmoe", {"attention_bias": True}, "attention_bias=True"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    (
        "glm4_moe",
        {"n_group": 8, "topk_group": 4},
        r"num_groups=8 .* a group has 1 experts, and glm4_moe ranks it by its best 2",
    ),
    ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate=false"),
    ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("glm4_moe_lite", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types="),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 beside number of dense layers"),
    ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v32", {"index_topk": None}, "lacks index_topk"),
    ("deepseek_v32", {"index_topk": "8"}, "index_topk='8'; wanted a whole number"),
    ("deepseek_v32", {"q_lora_rank": None}, "lacks q_lora_rank"),
    ("deepseek_v32", {"index_head_dim": 4}, "model.indexer.width=4 is less than model.mla.qk_rope_head_dim=8"),
    ("deepseek_v32", {"attention_dropout": 0.1}, "model.attention_dropout=0.1"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
    ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "has 3 layers, of which each is full or shared"),
    ("glm_moe_dsa", {"indexer_types": ["full", "some", "full"]}, "of which each is full or shared"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "no choice before the first layer"),
    ("dots1", {"norm_topk_prob": None}, "norm_topk_prob=None"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("dots1", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
    ("dots1", {"layer_types": None, "sliding_window": 7, "max_window_layers": 2}, "max_window_layers=2"),
    ("solar_open", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
    ("solar_open", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, r"attn_type_list=\[1, 0, 1\]"),
    ("minimax_m2", {"rotary_dim": 8}, r"partial_rotary_factor=0.3333.* beside .*partial_rotary_factor=0.5"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=True"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias=True"),
    ("mistral", {"sliding_window": 255}, "sliding_window=255"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types="),
    ("gpt_oss", {"sliding_window": None}, "lacks sliding_window"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": None}}, "mscale_all_dim=1.0"),
    ("qwen3_moe", {"num_hidden_layers": "4"}, "num_hidden_layers='4'; wanted a whole number"),
    ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; wanted a number"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor=2.0"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; wanted true or false"),
    ("qwen3_moe", {"num_hidden_layers": 10**18}, "wanted a whole number of at most 10000"),
    ("qwen3_moe", {"num_experts": 10**18, "num_local_experts": 10**18}, "less than or equal to 10000"),
]


@pytest.mark.parametrize(("case", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_settings_that_megatron_lacks_are_refused_by_name(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_model_from_hf(oracle(case).config | change)


OTHER_VALUES = (None, True, 0, 3, 2.5, -1.5, 10**18, "text", "false", [], [None], ["text"], {}, {"text": 1})


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_any_type_is_read_or_refused_by_a_sentence(family: str) -> None:
    """No key that a config.json has, of the rotary positions too, ends in an error of Python's own."""
    config = oracle(family).config
    rope = config["rope_parameters"]
    changes = [{key: value} for key in (*config, "id2label") for value in OTHER_VALUES]
    changes += [{"rope_parameters": rope | {key: value}} for key in rope for value in OTHER_VALUES]
    refused = 0
    for change in changes:
        try:
            checked_model_from_hf(copy.deepcopy(config) | change)
        except ConfigError:
            refused += 1
    assert refused > len(changes) / 2
