import subprocess

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.launch.submit import CHECKOUT, code_at, copy_code, refuse_changes


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True).stdout


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for package in CHECKOUT:
        (root / package).mkdir(parents=True)
        (root / package / "a.py").write_text("A = 1\n")
    (root / "launch" / "recipes").mkdir()
    (root / "launch" / "recipes" / "r.toml").write_text("x = 1\n")
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def copied(root, folder):
    folder.mkdir()
    copy_code(code_at(root), folder)
    return folder


def test_a_clean_checkout_is_copied_as_its_commit(checkout, tmp_path):
    code = code_at(checkout)
    assert code.commit == git(checkout, "rev-parse", "HEAD").decode().strip() and code.changed == ()
    refuse_changes(code)
    folder = copied(checkout, tmp_path / "launch")
    assert (folder / "commit.txt").read_text().strip() == code.commit
    assert (folder / "code/mcore_rl/a.py").read_text() == "A = 1\n"
    assert not (folder / "code.patch").exists() and not (folder / "code/.gitignore").exists()


def test_what_is_not_committed_is_refused_by_name_unless_it_is_a_recipe(checkout):
    (checkout / "launch/recipes/r.toml").write_text("x = 2\n")
    (checkout / "notes.txt").write_text("not code\n")
    refuse_changes(code_at(checkout))
    (checkout / "mcore_rl/a.py").write_text("A = 2\n")
    (checkout / "mcore_rl/new.py").write_text("B = 1\n")
    with pytest.raises(ConfigError, match=r"mcore_rl/a.py, mcore_rl/new.py\. Commit, or give --allow-dirty"):
        refuse_changes(code_at(checkout))


def test_a_dirty_checkout_is_copied_as_it_is_with_a_patch_that_leads_there_from_the_commit(checkout, tmp_path):
    (checkout / "mcore_rl/a.py").write_text("A = 2\n")
    (checkout / "mcore_rl/new.py").write_text("B = 1\n")
    (checkout / "launch/a.py").unlink()
    before = git(checkout, "status", "--porcelain"), git(checkout, "count-objects")
    folder = copied(checkout, tmp_path / "launch")
    assert (git(checkout, "status", "--porcelain"), git(checkout, "count-objects")) == before
    assert (folder / "code/mcore_rl/a.py").read_text() == "A = 2\n"
    assert (folder / "code/mcore_rl/new.py").exists() and not (folder / "code/launch/a.py").exists()
    git(tmp_path, "clone", "-q", str(checkout), "again")
    git(tmp_path / "again", "apply", str(folder / "code.patch"))
    for name in ("mcore_rl/a.py", "mcore_rl/new.py"):
        assert (tmp_path / "again" / name).read_text() == (folder / "code" / name).read_text()
    assert not (tmp_path / "again/launch/a.py").exists()
    assert (folder / "commit.txt").read_text().strip().endswith("and code.patch")


def test_an_installed_package_is_copied_without_a_commit(checkout, tmp_path):
    git(checkout, "rev-parse", "HEAD")
    (checkout / ".git").rename(tmp_path / "elsewhere")
    (checkout / "mcore_rl/__pycache__").mkdir()
    folder = copied(checkout, tmp_path / "launch")
    assert "installed" in (folder / "commit.txt").read_text()
    assert (folder / "code/launch/recipes/r.toml").exists()
    assert not (folder / "code/mcore_rl/__pycache__").exists()
