"""A heterogeneous job of `mcore-rl launch --servers`: trainer and inference servers on nodes of their own."""

import json

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.test_launch import CLUSTER, mcore_rl


def test_a_job_starts_servers_on_their_own_nodes_trains_with_them_and_ends_them(cluster: Cluster) -> None:
    """The servers answer from a table, so that no probe can hold."""
    (cluster.shared / "cluster.toml").write_text(CLUSTER.format(python=cluster.python))
    command = json.dumps([str(cluster.python), str(cluster.code / "tests/fake_server.py")])
    launched = mcore_rl(
        cluster,
        *("launch", "data/rl.toml", "--cluster", "cluster.toml", "--allow-dirty", "--nodes", "1"),
        *("--servers", "2", "run_dir=served", "train.steps=4", "rl.engine.kind=vllm"),
        *(f"rl.engine.command={command}", "rl.engine.probe_tolerance=1e9"),
        *("model.attention_dropout=0", "model.hidden_dropout=0", "train.eval_interval=none"),
    )
    assert launched.returncode == 0, launched.stderr
    job, run = launched.stdout.strip(), cluster.shared / "served"
    log = run / "logs" / f"{job}.log"
    ended = cluster.until_state(job, ENDED, 300)
    assert ended == "COMPLETED", log.read_text()[-3000:] if log.exists() else ended
    status = json.loads((run / "servers/status.json").read_text())
    assert status["version"] == 4 and [one["is_serving"] for one in status["servers"]] == [True, True]
    hosts = {one["url"].split("/")[2].split(":")[0] for one in status["servers"]}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # One update before the first rollout batch, and one after each of two.
    assert [record["servers/living"] for record in records if "servers/living" in record] == [2, 2]
    assert len(hosts) == 2 and len(list((run / "servers").glob("*.log"))) == 2
    shown = mcore_rl(cluster, "jobs", "served").stdout
    assert "servers 2/2" in shown, shown
    cluster.until_idle(sorted(hosts))
