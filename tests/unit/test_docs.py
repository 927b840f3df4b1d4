"""What the documentation shows is so: commands are read by the real parser, configs pass the checks, messages exist."""

import ast
import re
from pathlib import Path

import pytest

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import parser_of, split_name
from mcore_rl.config.load import kind_of
from mcore_rl.config.recipes import config_file
from tests.documented import GROUPS, PAGES, ROOT, commands

NEEDS_MORE = ("torchrun", "srun", "sbatch")
FOLDERS = ("mcore_rl", "launch", "tools", "examples", "bench", "tests")
PROGRAM_OF = {
    "pretrain": "pretrain", "sft": "sft", "rl": "rl", "rm": "rm", "dpo": "dpo", "problems": "rl", "reward": "rl",
    "config": None,
}  # fmt: skip


ALL = [command for page in PAGES for command in commands(page) if command.words[0] != "mv"]


def written_on(page):
    """The files that a page's commands print into, as `mcore-rl init FOLDER > my.toml`."""
    lines = [command.words for command in commands(ROOT / page)]
    return {words[words.index(">") + 1] for words in lines if ">" in words}


def checked(program, config, overrides, ranks):
    """The config passes all checks: a recipe by its name, or a file of the repository."""
    path = ROOT / config if config.endswith(".toml") else config_file(Path(config))
    assert path.exists(), f"{config} is not in the repository"
    PROGRAMS[program or kind_of(path, overrides)].checked_config(path, overrides, ranks)


def test_files_that_pages_name_exist():
    """A path with a folder, such as `rl/trainer.py`, is the end of a file's path here."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"`([\w/-]+/[\w-]+\.py)`", text))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []


def test_pages_name_recipes_and_clusters_as_an_installed_wheel_finds_them():
    named = re.compile(r"launch/(?:recipes|clusters)/\w+(?:/\w+)?\.toml")
    assert [page.name for page in PAGES if named.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("command", ALL, ids=lambda command: f"{command.page}: {command.line}"[:120])
def test_a_command_is_one_and_its_config_can_run(command):
    name, *rest = command.words
    rest = rest[: rest.index(">")] if ">" in rest else rest
    if name == "make":
        targets = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in " ".join(targets).split()
    elif name == "mcore-rl":
        if rest == ["--help"]:
            return
        command_name, words = split_name(rest)
        if "--help" in words:
            return
        args = parser_of(command_name).parse_intermixed_args(words)
        if getattr(args, "model", None) or getattr(args, "config", None) in written_on(command.page):
            return  # tests/docs has the model, and makes the file
        if command_name == "eval" and args.config.startswith("runs/"):
            return  # a run that the page, or the quickstart, has made
        if command_name == "eval":
            kind = kind_of(config_file(Path(args.config)), args.overrides, ("rl", "rm"))
            checked(kind, args.config, args.overrides, args.ranks)
        elif command_name in PROGRAM_OF:
            checked(PROGRAM_OF[command_name] or args.program, args.config, args.overrides, getattr(args, "ranks", None))
    elif "-m" in rest:
        module, *words = rest[rest.index("-m") + 1 :]
        if module.startswith("mcore_rl.cli."):
            config, *overrides = words
            checked(module.rpartition(".")[2], config, overrides, None)
        else:
            assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    else:
        script = (ROOT / rest[0]).read_text(encoding="utf-8")
        options = {word for word in rest if word.startswith("--")}
        imported = "".join(
            (ROOT / f"{module.replace('.', '/')}.py").read_text()
            for module in re.findall(r"^from (mcore_rl\S+) import", script, re.MULTILINE)
        )
        assert all(option in script + imported for option in options)


def test_what_this_machine_cannot_run_is_marked():
    assert [command.line for command in ALL if command.is_marked != wants_more(command)] == []


def wants_more(command):
    """A GPU, a launcher, a cluster, or a server or model that no laptop has; tests/docs runs the rest."""
    words = command.words
    of_cluster = [["mcore-rl", name] for name in ("launch", "jobs", "attach")]
    wants_cluster = words[0] in NEEDS_MORE or words[:2] in of_cluster
    trains = words[0] == "mcore-rl" and words[1] in ("pretrain", "sft", "rm", "dpo", "rl", "eval")
    is_of_any_model = words[2:3] == ["--model"] or any(word in written_on(command.page) for word in words[2:3])
    is_of_run = words[1:2] == ["eval"] and words[2].startswith("runs/")
    is_large = trains and "tiny_moe" not in words[2] and not is_of_any_model and not is_of_run
    wants_gpu = "platform.precision=bf16" in words or words == ["make", "gpu"]
    wants_server = "--url" in words or "--calibrate" in words
    return wants_cluster or is_large or wants_gpu or wants_server


def templates():
    """Every text in the code, values of f-strings as `…`, and the script that all jobs share."""
    yield (ROOT / "launch/job.sh").read_text(encoding="utf-8")
    for folder in ("mcore_rl", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_transformer_engine_is_compiled_for_the_installed_torch_wherever_it_is_recommended():
    """Its own manual says so too: pip's isolation takes the newest torch for the compilation."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    advice = [words for text in [*pages, *templates()] for words in re.findall(r"pip install ([^`\n]*)\[gpu\]", text)]
    assert len(advice) == 4 and all(words.startswith("--no-build-isolation ") for words in advice)


def test_every_message_of_troubleshooting_is_one_of_the_code():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    shown = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(shown) > 30
    texts = list(templates())

    def is_in_the_code(message):
        parts = message.split("…")
        longest, pattern = max(parts, key=len), re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        return any(longest in text and pattern.search(text) for text in texts)

    assert [message for message in shown if not is_in_the_code(message)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/fields").glob("[mprs]*.md")), ids=lambda page: page.stem)
def test_every_field_and_metric_of_a_reference_page_has_one_anchor(page):
    text = page.read_text()
    anchors = re.findall(r'<a id="([^"]+)"></a>', text)
    assert len(anchors) > 10 and len(set(anchors)) == len(anchors)
    assert set(anchors) == set(re.findall(r"^\| (?:<a [^>]+></a>)?`([\w./]+)`", text, re.MULTILINE))
    # Each section is a heading, so that it is in the table of contents.
    sections = re.findall(r"^## `\[([\w.]+)\]`$", text, re.MULTILINE)
    assert page.stem == "metrics" or {key.rpartition(".")[0] for key in anchors} <= {*sections, ""}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            other = (page.parent / target).resolve() if target else page
            assert other.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:] if page.parent.name != "fields"]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []
    fields = (ROOT / "docs/fields/README.md").read_text(encoding="utf-8")
    pages = [page.name for page in PAGES if page.parent.name == "fields"]
    assert [page for page in pages if page != "README.md" and f"({page})" not in fields] == []


def test_the_site_has_every_page():
    """zensical builds what is in docs, and shows in its menus what mkdocs.yml names."""
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])


def test_paths_and_fields_and_metrics_on_the_pages_exist():
    fields = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "fields")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:mcore_rl|launch|tools|tests|bench)/[\w/.]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for name in re.findall(r"`((?:train|moe|policy|rollout|routes|rollout_routes|reward|time)/[a-z_/]+)`", text):
            assert f"`{name}`" in fields or f"`{name}_" in fields, f"{page.name}: {name}"
        for name in re.findall(
            r"`((?:mesh|platform|train|optim|checkpoint|log|replay|rl\.\w+|model\.moe)\.(?!py\b)[a-z_0-9]+(?:\.[a-z_0-9]+)*)",
            text,
        ):
            assert f"`{name}`" in fields, f"{page.name}: {name}"


def test_the_way_to_read_one_step_is_short():
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    way = text[text.index("Begin with [`examples") : text.index("The parts of a step, in order")]
    names = [name for name in re.findall(r"`([\w/]+\.py)`", way) if not name.startswith(("examples/", "tests/"))]
    assert len(names) == 7
    files = [ROOT / "mcore_rl" / name for name in names]
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in files) <= 2100


def test_every_page_with_commands_is_in_a_group() -> None:
    shown = {command.page for page in PAGES for command in commands(page) if not command.is_marked}
    assert shown == {page for group in GROUPS for page in group}
