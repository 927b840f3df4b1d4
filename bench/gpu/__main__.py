"""Check and measure this package on one GPU, in at most ten minutes, in order of worth.

    python -m bench.gpu                        all steps on the GPU; bench/results/gpu/<time>.json has every figure,
                                               and <time>.md the table that is printed at the end
    python -m bench.gpu --device cpu           the same code with small shapes: a rehearsal, no measurement
    python -m bench.gpu --steps training kernels

Each step is a process of its own with a share of the time: the next one runs when it fails or takes too long, and what
it had found by then is kept. A step that cannot run here, as a package or a second GPU is missing, is "not run". Where
torch cannot use a GPU the reason is printed at once. Status 1 when a step failed.
Nothing is downloaded.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
STEPS = {
    "machine": 40,
    "training": 90,
    "families": 90,
    "kernels": 60,
    "memory": 90,
    "slice": 150,
    "rl": 90,
    "servers": 120,
    "slots": 120,
    "conversion": 30,
    "extras": 60,
    "ranks": 60,
}
"""Steps in order of worth, with the most seconds that each may take; `ALL` of steps.py has their functions."""
BUDGET_S = {"cuda": 600.0, "cpu": 3600.0}
"""Seconds for all steps: a rehearsal measures nothing, and may run on a busy machine."""
PROBE = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
PROBE_S = 120.0
NOTHING: dict[str, Any] = {"summary": "", "figures": {}, "table": [], "is_not_run": False}
RESULT = "RESULT "
"""Beginning of the lines in which a step's process prints what it has found; each one replaces those before it."""


def main() -> int:
    """Run the steps and write the results; return 0, or 1 when a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--output", type=Path, help="file to write (default: bench/results/gpu/<time>.json)")
    parser.add_argument("--budget", type=float, help="seconds for all steps (default 600, in a rehearsal 3600)")
    args = parser.parse_args()
    begin, now = time.monotonic(), datetime.datetime.now(datetime.UTC)
    document: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "device": args.device,
        "is_rehearsal": args.device == "cpu",
        "versions": {},
        "steps": {},
    }
    output = args.output or RESULTS / f"{now:%Y-%m-%dT%H%M%S}-{args.device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    trouble = trouble_of_gpu() if args.device == "cuda" else ""
    if trouble:
        document["trouble"] = trouble
        output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"torch cannot use a GPU here: {trouble}\nwritten to {output}")
        return 1
    for name in args.steps:
        left = (args.budget or BUDGET_S[args.device]) - (time.monotonic() - begin)
        document["steps"][name] = run_step(name, args.device, min(STEPS[name], left) if args.device == "cuda" else left)
        document["versions"] |= document["steps"][name].pop("versions", {})
        # After every step: what is known is kept when the machine is taken away.
        output.write_text(json.dumps(document, indent=1) + "\n")
        outcome = document["steps"][name]
        print(f"{name:<11}{outcome['status']:<8}{outcome['seconds']:6.1f} s  {outcome['summary']}", flush=True)
    failed = [name for name, outcome in document["steps"].items() if outcome["status"] == "failed"]
    table = output.with_suffix(".md")
    table.write_text(table_of(document))
    print(
        f"\n{table.read_text()}\nwritten to {output} and {table.name}"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def table_of(document: dict[str, Any]) -> str:
    """Return the table of all steps in Markdown: each figure, and the plan, limit or mark of others beside it."""
    rows = [("step", "figure", "found", "beside it"), ("---", "---", "---", "---")]
    for name, step in document["steps"].items():
        rows.append(
            (name, f"{step['status']}, {step['seconds']:.0f} s", "", "" if step["status"] == "ok" else step["summary"])
        )
        rows += [("", *row) for row in step["table"]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["| " + " | ".join([*map(str.ljust, row[:3], widths), row[3]]) + " |" for row in rows]
    kind = " (a rehearsal: no figure is a measurement)" if document["is_rehearsal"] else ""
    return f"{document['date']} on {document['device']}{kind}\n\n" + "\n".join(lines) + "\n"


def trouble_of_gpu() -> str:
    """Return why torch cannot use a GPU, "" where it can: a build for CPUs, a driver that is missing or too old, or
    none of its kernels for this GPU.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a sum of eight numbers did not end within {PROBE_S:.0f} s"
    return "" if done.returncode == 0 else last_line(done.stderr) or f"status {done.returncode}"


def last_line(text: str) -> str:
    """Return the last line that is not empty, "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run_step(name: str, device: str, seconds: float, *, within: bool = False) -> dict[str, Any]:
    """Return status (ok, failed, not run), seconds, summary, figures and table of a step, run in a process of its own.

    Args:
        name: The step.
        device: Its device.
        seconds: Its limit.
        within: Whether it is a part of another step, and ends with that one.
    """
    if seconds < 1.0:
        return NOTHING | {"status": "failed", "seconds": 0.0, "summary": "no time was left"}
    # On a machine with a GPU the CPU's half of a comparison must not see it: Megatron is patched by what torch sees.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-m", "bench.gpu.steps", name, "--device", device]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # A session of its own, so that the processes which it starts end with it: they would keep the GPU.
        process = subprocess.Popen(
            command, env=os.environ | hidden, stdout=output, stderr=errors, start_new_session=not within
        )
        try:
            status, reason = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            status, reason = -1, f"it did not end within {seconds:.0f} s"
            # A server has a session of its own, and is found while its parent lives.
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        finally:
            process.kill()
            if not within:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        lines = [line for line in output if line.startswith(RESULT) and line.endswith("\n")]
        error = errors.read()
    took = round(time.monotonic() - begin, 1)
    found = NOTHING | (json.loads(lines[-1].removeprefix(RESULT)) if lines else {})
    ended = "not run" if found.pop("is_not_run") else "ok"
    if status == 0 and lines:
        return {"status": ended, "seconds": took, **found}
    # The figures until then are kept.
    failed = {"summary": reason or last_line(error) or f"status {status} without a result", "error": error[-4000:]}
    return {"status": "failed", "seconds": took, **found, **failed}


if __name__ == "__main__":
    sys.exit(main())
