"""What ranks would refuse is refused before they start, once."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.checks.run import absent_packages
from mcore_rl.cli.before_ranks import FIRST, refuse_first_records
from mcore_rl.cli.cli import main
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.preferences import DPOConfig, RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import LogConfig, PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError, DataError, TrainingError
from tests.forked import run_command
from tests.tokenizer_files import write_tokenizer

PROMPT = {"prompt": "12=", "answer": "21"}
CHAT = {"prompt": "12=", "response": "21"}
PAIR = {"prompt": "12=", "chosen": "21", "rejected": "12"}
OTHER = {"number": 4}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(*entries: object) -> str:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return str(path)

    return write


def configs(path: str, *words: str) -> list[RunConfig]:
    """A config of each kind that reads text, with `words` for its section of data."""
    data = [f"data.{word}" for word in words]
    prompts = [f"rl.prompts.{word}" for word in words]
    return [
        load_config(SFTConfig, None, [f"data.train={path}", *data]),
        load_config(DPOConfig, None, [f"data.train={path}", *data]),
        load_config(RlRunConfig, None, [f"rl.prompts.files={path}", "rl.reward.parts=[exact]", *prompts]),
        load_config(RlRunConfig, None, [f"rl.eval.files={path}", "rl.reward.parts=[exact]", *prompts]),
    ]


def test_bad_lines_are_refused_where_the_config_allows_none(file: Callable[..., str]) -> None:
    good = PROMPT | CHAT | PAIR
    for config in configs(file(good, good)):
        refuse_first_records(config)
    for config in configs(path := file(good, OTHER)):
        with pytest.raises(DataError, match=f"{path}:2: .*number"):
            refuse_first_records(config)
    for config in configs(path, "max_bad=1"):
        refuse_first_records(config)


def test_what_conversations_and_pairs_after_the_first_ones_mean_is_left_to_the_ranks(file: Callable[..., str]) -> None:
    good = PROMPT | CHAT | PAIR
    for config in configs(file(*[OTHER] * FIRST, good), "max_bad=none"):
        refuse_first_records(config)
    for config in configs(file(*[good] * FIRST, OTHER))[:2]:
        refuse_first_records(config)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_file_that_is_cut_off_anywhere_is_refused(file: Callable[..., str], is_list: bool) -> None:
    good = PROMPT | CHAT | PAIR
    path = Path(file(*[good] * (FIRST + 5)))
    steps = ["data.format=steps", f"data.train={path}"]
    texts = ["rl.prompts.task=sorting", f"rl.ptx.files={path}", "rl.ptx.coeff=0.1"]
    every = [*configs(str(path)), load_config(RlRunConfig, None, texts), load_config(RewardModelConfig, None, steps)]
    for config in every:
        refuse_first_records(config)
    whole = path.read_bytes()
    if is_list:
        whole = b"[" + whole.rstrip().replace(b"\n", b",\n") + b"]"
    path.write_bytes(whole[:-20])
    for config in every:
        with pytest.raises(DataError, match="damaged or cut off" if is_list else f"{path}:105: not JSON"):
            refuse_first_records(config)


def test_prompts_and_functions_that_are_not_there_are_refused(file: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"no answer in .answer., .*\n?.*|holds no prompt"):
        refuse_first_records(configs(file({"prompt": "12="}))[2])
    reward = ["rl.prompts.task=sorting", "rl.reward.parts=[nowhere:reward]"]
    with pytest.raises(ConfigError, match="Start in the folder with nowhere"):
        refuse_first_records(load_config(RlRunConfig, None, reward))


def test_a_reward_of_the_users_that_always_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text("def fails(scored):\n    return scored.price\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_tokenizer(tmp_path)
    words = ["rl.prompts.task=sorting", "rl.reward.parts=[own_rewards:fails]", "data.chat_template=raw"]
    words += [f"data.tokenizer.path={tmp_path}", "data.tokenizer.kind=huggingface", "model.vocab_size=300"]
    with pytest.raises(TrainingError, match=r"own_rewards:fails(.|\n)*no attribute 'price'"):
        refuse_first_records(load_config(RlRunConfig, None, words))


def test_an_error_does_not_advise_the_field_that_was_just_set(file: Callable[..., str]) -> None:
    chats, _, prompts, _ = configs(file({"question": "12=", "answer": "21"}), "prompt_field=quest")
    with pytest.raises(DataError) as raised:
        refuse_first_records(chats)
    assert "data.prompt_field names it; name another key" in str(raised.value)
    assert "(keys: question, answer)" in str(raised.value) and "name its fields" not in str(raised.value)
    with pytest.raises(DataError, match=r'no text in .quest. .*rl\.prompts\.prompt_field is "quest"'):
        refuse_first_records(prompts)


def test_a_run_with_bad_lines_is_refused_once_and_has_no_log_of_a_rank(
    file: Callable[..., str], tmp_path: Path
) -> None:
    words = [f"rl.prompts.files={file(OTHER)}", "checkpoint.load=none", f"run_dir={tmp_path}/run"]
    ended = run_command("rl", "tiny_moe/own_prompts", *words, "data.tokenizer.path=gone")
    assert ended.returncode == 2 and "data.tokenizer.path names the tokenizer gone" in ended.stderr
    (tmp_path / "tokenizer.model").write_text("")
    words.append(f"data.tokenizer.path={tmp_path}/tokenizer.model")
    ended = run_command("rl", "tiny_moe/own_prompts", *words)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("holds no prompt in 1 lines") == 1 and "First cause" not in ended.stderr
    assert not list((tmp_path / "run").rglob("rank_*.log"))


def test_an_evaluation_without_prompts_is_refused_before_ranks(
    file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "tokenizer.model").write_text("")
    words = [f"rl.prompts.files={file(PROMPT)}", f"data.tokenizer.path={tmp_path}/tokenizer.model"]
    assert main(["eval", "tiny_moe/own_prompts", *words, "checkpoint.load=none", f"run_dir={tmp_path}/run"]) == 2
    assert "rl.eval.files is empty" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_without_rewards_is_no_config_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "config.toml").write_text(dump_config(SFTConfig()))
    assert main(["eval", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path} is a run of sft, which has no prompts with a reward." in message
    assert f"or --model {tmp_path} --data FILE --reward PART" in message


def test_a_logger_that_is_not_installed_is_refused_before_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = list(absent_packages(PretrainConfig(log=LogConfig(sinks=("jsonl", "wandb", "trackio", "mine:Sink")))))
    assert len(found) == 2
    assert "pip install 'mcore-rl[wandb]'" in found[0] and "pip install 'mcore-rl[trackio]'" in found[1]
    assert list(absent_packages(PretrainConfig())) == []


@pytest.mark.parametrize(
    ("versions", "is_refused"),
    [
        ({"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}, False),
        ({"megatron-core": "0.19.2"}, True),
        ({"megatron-core": "0.16.1", "emerging-optimizers": "0.3.0"}, True),
        ({"megatron-core": "0.19.2", "emerging-optimizers": "999.9.9"}, True),
    ],
)
def test_muon_is_refused_before_ranks_without_its_packages(
    versions: dict[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(version=versions[name])] if name in versions else []

    monkeypatch.setattr("mcore_rl.config.optim.distributions", found)
    messages = list(absent_packages(load_config(PretrainConfig, None, ["optim.kind=muon"])))
    assert len(messages) == is_refused and all("mcore-rl[muon]" in message for message in messages)
    critic = ["rl.advantage.kind=gae", "rl.advantage.critic.optim.kind=muon"]
    messages = list(absent_packages(load_config(RlRunConfig, None, critic)))
    assert len(messages) == is_refused and all("critic.optim.kind" in message for message in messages)
