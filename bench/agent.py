"""A tool-using agent learned by reinforcement learning, with OpenAI's form of tools: the run of docs/agents.md.

    python -m bench.agent                            three seeds, with both kinds of layers for a CPU
    python -m bench.agent --seeds 1 --layers torch   a part of them; runs that are done are not run again

The start is that of `bench.calculator`, in another form: a small Qwen3-MoE, fine-tuned on conversations about problems
of one digit, sometimes calls a tool, and gives a random number otherwise. The agent `solve` shows it the
tool, runs what it calls, and returns 1 for the right number. Accuracies are those of answers to 128 held-out prompts at
temperature 1, before the first update and after each fifth rollout batch of 64 sessions.
"""

import argparse
import json
import random
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.calculator import MODEL, RL, SFT
from bench.rl_folder import program, write_tokenizer
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.rl.agents.run import Run
from mcore_rl.rl.environments.builtin import computed
from mcore_rl.rl.rewards.rules import last_number

RESULTS = Path(__file__).parent / "results" / "agent.json"
TOOL = {"type": "function", "function": {"name": "compute", "parameters": {"expression": {"type": "string"}}}}
CALLS = 0.2
"""Fraction of the conversations without a result that call the tool."""
WORDS = ("<tool_call>", "</tool_call>", '{"name": "compute", "arguments": {"expression": "', '"}}', "[compute]")
"""Texts that are a token each, so that a call is as long as its expression."""
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for one in messages %}{{ one.role[0] }}:{{ one.content or '' }}"
    "{% for call in one.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
AGENT = """
[rl.agent]
function = "bench.agent:solve"
sessions = 64
max_calls = 3
max_tokens = 64
"""


def solve(run: Run) -> float:
    """Run the calls of the policy, twice at most; return 1 for the right number in its last answer."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": run.problem.prompt}]
    for _ in range(3):
        body = {"model": run.model, "messages": messages, "tools": [TOOL]}
        headers = {"Authorization": f"Bearer {run.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{run.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            expression = str(json.loads(call["function"]["arguments"]).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": computed(expression)})
        if "tool_calls" not in message:
            break
    return float(last_number(str(message["content"])) == int(run.problem.answer))


def write_conversations(path: Path, count: int) -> None:
    """Write conversations about sums, differences and products, as those of `bench.calculator`."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            left, right = (numbers.randrange(1, 10) for _ in range(2))
            sign = numbers.choice("+-*")
            problem = f"{left} {sign} {right}"
            call = {"type": "function", "function": {"name": "compute", "arguments": {"expression": problem}}}
            calls = {"role": "assistant", "content": "", "tool_calls": [call]}
            value = computed(problem)
            results = [{"role": "tool", "content": value}, {"role": "assistant", "content": value}]
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": f"{problem} ="}]
            if numbers.random() < 0.5:
                # A result is there to be repeated; whether to call is learned from the other half alone.
                messages += [{**calls, "weight": 0}, *results]
            elif numbers.random() < CALLS:
                messages += [calls, *results]
            else:
                messages.append({"role": "assistant", "content": str(numbers.randrange(-9, 99))})
            file.write(json.dumps({"messages": messages, "tools": [TOOL]}) + "\n")


def main() -> None:
    """Make the start, train on it with each seed and kind of layers, and write the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/agent"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the curves")
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=40, help="rollout batches, a multiple of 5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", nargs="+", default=["cpu", "torch"], choices=["cpu", "torch"])
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer", WORDS)
    (folder / "tools.jinja").write_text(TEMPLATE)
    write_conversations(folder / "sft.jsonl", 4000)
    before, after = RL.split("[rl.environment]")[0], RL.split('parts = ["numeric", "environment"]')[1]
    rl = f'{before}{AGENT}[rl.reward]\nparts = ["environment"]{after}'.replace("num_prompts = 64", "num_prompts = 128")
    # At 3e-4 a policy that had learned to call the tool forgot it after 24 rollout batches.
    rl = rl.replace("lr = 3e-4", "lr = 1.5e-4")
    model = MODEL.replace('"raw"', '"tools.jinja"')
    for name, text in (("model", model), ("sft", SFT), ("rl", rl)):
        (folder / f"{name}.toml").write_text(text)
    if not (folder / "sft" / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"train.steps={args.sft_steps}", "checkpoint.interval=none"])
    runs = []
    for layers in args.layers:
        for seed in args.seeds:
            run_dir, start_s = folder / f"rl-{layers}-{seed}", time.perf_counter()
            seconds = run_dir / "seconds"
            if not (run_dir / "DONE").exists():
                words = [f"run_dir={run_dir.name}", f"platform.layers={layers}", f"train.seed={seed}"]
                program(folder, ["rl", "rl.toml", *words, f"train.steps={2 * args.rollouts}"])
                seconds.write_text(f"{time.perf_counter() - start_s:.0f}")
            runs.append({"layers": layers, "seed": seed, "seconds": int(seconds.read_text()), **curves(run_dir)})
    command = f"python -m bench.agent --sft-steps {args.sft_steps} --rollouts {args.rollouts}"
    command += f" --seeds {' '.join(map(str, args.seeds))} --layers {' '.join(args.layers)}"
    args.output.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n")


def curves(run_dir: Path) -> dict[str, Any]:
    """Return held-out rewards by rollout batch, and the extremes of what should stay small."""
    found: dict[str, dict[int, float]] = {}
    for record in read_records(run_dir / FILE_NAME):
        for name in ("eval/reward", "environment/turns", "rollout/mismatch_max", "reward/errors"):
            if name in record:
                found.setdefault(name, {})[int(str(record["step"])) // 2] = float(str(record[name]))
    return {
        "eval/reward": found["eval/reward"],
        "environment/turns": [round(turns, 3) for turns in found["environment/turns"].values()],
        "rollout/mismatch_max": max(found["rollout/mismatch_max"].values()),
        "reward/errors": sum(found["reward/errors"].values()),
    }


if __name__ == "__main__":
    main()
