from mcore_rl.launch.records import last_step, next_folder, submissions, writing_job
from mcore_rl.storage.checkpoint import Marker, complete_in, path_of_step, step_of, write_marker
from mcore_rl.train.run_folder import _text
from mcore_rl.workers.attempt import this_attempt


def test_the_newest_checkpoint_is_the_one_that_training_would_resume_from(tmp_path):
    folder = tmp_path / "checkpoints"
    assert last_step(tmp_path) is None
    for step in (90, 100, 1100):
        path_of_step(folder, step).mkdir(parents=True)
    for step in (90, 100):
        marker = Marker(step=step, time="", world_size=1, mesh={}, model={}, megatron="", files={})
        write_marker(path_of_step(folder, step), marker)
    assert last_step(tmp_path) == step_of(complete_in(folder)[-1]) == 100


def test_the_job_of_the_fence_is_read_as_training_writes_it(tmp_path, monkeypatch):
    assert writing_job(tmp_path) == ""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    (tmp_path / "writer.json").write_text(_text(this_attempt()))
    assert writing_job(tmp_path) == "4711"


def test_launches_are_numbered_and_foreign_files_among_them_are_passed_over(tmp_path):
    assert next_folder(tmp_path).name == "0" and submissions(tmp_path) == []
    for name in ("0", "9", "10", "notes"):
        (tmp_path / "launch" / name).mkdir(parents=True)
    assert next_folder(tmp_path).name == "11"
    for content in ("torn{", "null", "[]", '{"job": [], "nodes": {}}', "[" * 100_000):
        (tmp_path / "launch/9/submission.json").write_text(content)
        assert submissions(tmp_path) == []
