import re
from pathlib import Path

import pytest

from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import dump_config, kind_of, load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError


def load(path=None, *overrides):
    return load_config(PretrainConfig, path, overrides)


def complaint(*overrides, path=None):
    with pytest.raises(ConfigError) as raised:
        load(path, *overrides)
    return str(raised.value)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_hold_and_cannot_be_changed():
    assert load() == PretrainConfig()
    with pytest.raises(ValueError, match="frozen"):
        load().mesh.tp = 2


def test_a_file_sets_nested_fields_and_the_command_line_wins_over_it_and_its_last_word_over_its_first(tmp_path):
    """A wrong value that is overridden does no harm."""
    path = write(
        tmp_path, "run.toml", "run_dir = 'x'\n[model]\nnum_layers = 3\nmoe.top_k = 4\n[mesh]\ntp = 'x'\npp = 2\n"
    )
    config = load(path, "mesh.tp=4", "mesh.tp=8")
    assert (config.run_dir, config.model.num_layers, config.model.moe.top_k) == ("x", 3, 4)
    assert (config.mesh.tp, config.mesh.pp) == (8, 2)


def test_of_several_bases_the_later_wins_and_the_file_itself_over_all(tmp_path):
    """A base may be reached twice where there is no circle, and its paths stay as they are written."""
    write(tmp_path, "deep.toml", "[mesh]\ntp = 16\ncp = 16\n")
    write(
        tmp_path, "a/first.toml", 'extends = "../deep.toml"\ndata.train = ["../text"]\n[mesh]\ntp = 1\npp = 1\nep = 1\n'
    )
    write(tmp_path, "b/second.toml", "[mesh]\npp = 2\nep = 2\n")
    bases = 'extends = ["deep.toml", "a/first.toml", "b/second.toml"]'
    config = load(write(tmp_path, "run.toml", f"{bases}\n[mesh]\nep = 4\n"))
    assert (config.mesh.tp, config.mesh.pp, config.mesh.ep, config.mesh.cp) == (1, 2, 4, 16)
    assert config.data.train == ("../text",)


@pytest.mark.parametrize(("path", "kind"), [("a/b.model", "sentencepiece"), ("a/Qwen3", "huggingface")])
def test_a_path_of_a_tokenizer_without_a_kind_has_the_kind_of_its_ending(path, kind):
    tokenizer = load_config(PretrainConfig, None, [f"data.tokenizer.path={path}"]).data.tokenizer
    assert (tokenizer.kind, tokenizer.path) == (kind, path)
    words = ["data.tokenizer.kind=none", f"data.tokenizer.path={path}"]
    assert load_config(PretrainConfig, None, words).data.tokenizer.kind == "none"
    assert load_config(PretrainConfig, None, ["data.tokenizer.path=none"]).data.tokenizer.kind == "none"


@pytest.mark.parametrize("section", ["data", "rl.prompts"])
def test_a_field_of_the_prompt_replaces_a_weaker_places_template(tmp_path, section):
    cls = SFTConfig if section == "data" else RlRunConfig
    base = write(tmp_path, "base.toml", f'[{section}]\nprompt_template = "Q: {{question}}"\n')

    def prompt(path, *words):
        config = load_config(cls, path, words)
        found = config.data if section == "data" else config.rl.prompts
        return found.prompt_field, found.prompt_template

    field = f"{section}.prompt_field=text"
    assert prompt(base) == ("prompt", "Q: {question}")
    assert prompt(base, field) == ("text", None)
    assert prompt(base, field, f"{section}.prompt_template=A: {{b}}") == ("text", "A: {b}")
    mine = write(tmp_path, "mine.toml", f'extends = "base.toml"\n[{section}]\nprompt_field = "text"\n')
    assert prompt(mine) == ("text", None)
    # In one place they say together where the text of the template goes.
    both = write(tmp_path, "both.toml", f'[{section}]\nprompt_field = "text"\nprompt_template = "A: {{b}}"\n')
    assert prompt(both) == ("text", "A: {b}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "b.toml"', r"run\.toml extends \S*b\.toml extends \S*run\.toml"),
        ('extends = "gone.toml"', r"gone\.toml.*extended by.*run\.toml"),
        (
            'extends = "link.toml"',
            r"link\.toml \(extended by \S*run\.toml\) cannot be read: Too many levels of symbolic links",
        ),
        ("a = 1\nb = = 2\n", r"run\.toml.*line 2"),
        *((f"extends = {value}", "expected a file name") for value in ("3", "[1]", "true")),
    ],
)
def test_a_file_that_is_no_config_or_extends_none_is_refused(tmp_path, text, message):
    write(tmp_path, "b.toml", 'extends = "run.toml"')
    (tmp_path / "link.toml").symlink_to("link.toml")
    assert re.search(message, complaint(path=write(tmp_path, "run.toml", text)))


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("optim.lr=1", "optim", "lr", 1.0),
        ("optim.lr=1e-3", "optim", "lr", 1e-3),
        ("optim.schedule=wsd", "optim", "schedule", "wsd"),
        ('optim.schedule="wsd"', "optim", "schedule", "wsd"),
        ("mesh.sequence_parallel=false", "mesh", "sequence_parallel", False),
        ('data.train=["a", "b"]', "data", "train", ("a", "b")),
        ("data.train=[a/x, b.y]", "data", "train", ("a/x", "b.y")),
        ('data.train=["a", "b"]', "data", "train", ("a", "b")),
        ("data.train=foo", "data", "train", ("foo",)),
        ("data.train=2024", "data", "train", ("2024",)),
        ("--data.train=foo", "data", "train", ("foo",)),
        ("data.split=[1,2,3]", "data", "split", (1.0, 2.0, 3.0)),
        ("data.cache_dir=2024", "data", "cache_dir", "2024"),
        ("data.cache_dir=a=b", "data", "cache_dir", "a=b"),
        ("mesh={tp=2, pp=4}", "mesh", "pp", 4),
    ],
)
def test_override_values_are_toml_bare_words_are_text_and_a_value_for_a_list_is_a_list_of_one(
    override, section, field, value
):
    got = getattr(getattr(load(None, override), section), field)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("sft", "one pass over a batch"), ("rm", "one pass over a batch"), ("dpo", "one update of a batch. The ref")],
)
def test_replay_where_no_two_passes_of_a_batch_are_compared_is_refused_with_the_reason(kind, reason):
    with pytest.raises(ConfigError) as refused:
        load_config(KINDS[kind], None, ["replay.kind=r2"])
    assert str(refused.value).startswith('replay.kind = "r2" on the command line: routing replay is of `mcore-rl rl`.')
    assert f"`mcore-rl {kind}` has none: it makes {reason}" in str(refused.value)


def test_an_unknown_key_in_a_file_names_the_file_and_so_does_an_unknown_empty_section(tmp_path):
    message = complaint(path=write(tmp_path, "run.toml", "[mesh]\ntq = 2\n[mess]\n"))
    assert message.count("run.toml") == 2 and "Unknown key mesh.tq" in message and "Unknown key mess " in message


def test_all_wrong_values_are_told_at_once_each_once():
    lines = complaint("mesh.tp=a", "platform.recompute_modules=[x, y]", "train.steps=no").splitlines()
    assert sorted(line.split(" = ")[0] for line in lines) == ["mesh.tp", "platform.recompute_modules", "train.steps"]


def test_a_dumped_config_loads_back_equal(tmp_path):
    config = load(
        None,
        "run_dir=" + repr('a "quoted" \\ path, tab\t and ünïcode'),
        "optim.lr=1e-7",
        "optim.eps=1e+22",
        "optim.clip_grad=1e300",
        'data.train=["a b", "c\\u007f"]',
        "data.split=[1, 0.5, 0]",
        "mesh.overlap_p2p=false",
        "platform.recompute_modules=[]",
    )
    assert load(write(tmp_path, "dumped.toml", dump_config(config))) == config


def test_words_that_are_no_settings_and_a_single_value_for_a_list_of_fixed_length_are_refused():
    assert complaint("data.split=98").startswith("data.split = 98 on the command line: expected a list of 3")
    assert complaint("data.train=").startswith('data.train = "" on the command line: expected a list')
    assert "not of the form key=value" in complaint("mesh.tp")
    assert "has bytes that are not UTF-8" in complaint("run_dir=runs/\udcff")


@pytest.mark.parametrize(
    ("name", "text", "overrides", "kind"),
    [
        ("mine.toml", "rl.loss.kind = 'gspo'", (), "rl"),
        ("pretrain.toml", "data.pack_buffer = 8", (), "sft"),  # its fields and not its name
        ("mine.toml", "data.seq_length = 8", ("data.split=[90, 5, 5]",), "pretrain"),
        ("sft_long.toml", "data.seq_length = 8", (), "sft"),
        ("grpo.toml", "train.steps = 8", (), "rl"),
        ("mine.toml", "arms.a = ['train.seed=1']", (), "study"),
        ("mine.toml", "pretrain.config = 'a.toml'", (), "pipeline"),
        ("mine.toml", "environment.NCCL_DEBUG = 'INFO'", (), "cluster"),
        ("rl.toml", "train.stepz = 8", (), "rl"),  # misspelt: of no kind, and the name is left
    ],
)
def test_the_kind_of_a_config_is_found_by_its_fields_and_then_by_its_name(name, text, overrides, kind, tmp_path):
    assert kind_of(write(tmp_path, name, text + "\n"), overrides) == kind


def test_a_config_of_another_program_is_named_as_such_in_one_line():
    assert complaint(path=Path("tiny_moe/grpo")) == (
        "tiny_moe/grpo is a config of rl, not of pretrain: it sets data.chat_template, rl.prompts.task, "
        "rl.prompts.smallest, .... Give it to `mcore-rl rl`."
    )


def test_overrides_of_a_section_that_may_be_none_add_up(tmp_path):
    """Fields of `rl.reward.model_tokenizer` come one by one, in a file, one that extends it, and as overrides."""
    (tmp_path / "base.toml").write_text('[rl.reward.model_tokenizer]\nkind = "huggingface"\npath = "a"\n')
    path = tmp_path / "rl.toml"
    path.write_text('extends = "base.toml"\n[rl.reward.model_tokenizer]\npath = "b"\n')
    found = load_config(RlRunConfig, path).rl.reward.model_tokenizer
    assert found is not None and (found.kind, found.path) == ("huggingface", "b")
    words = [f"rl.reward.model_tokenizer.{field}" for field in ("path=c", "kind=sentencepiece")]
    for given in (words, words[::-1]):
        found = load_config(RlRunConfig, path, given).rl.reward.model_tokenizer
        assert found is not None and (found.kind, found.path) == ("sentencepiece", "c")
    assert load_config(RlRunConfig, path, ["rl.reward.model_tokenizer=none"]).rl.reward.model_tokenizer is None


def test_what_follows_from_fields_is_that_of_the_copy_with_other_fields():
    model = load().model
    before = model.moe_layers
    deeper = model.model_copy(update={"num_layers": model.num_layers + 3})
    assert len(deeper.moe_layers) == len(before) + 3 == deeper.num_layers
    assert model.moe_layers == before and model == load().model
