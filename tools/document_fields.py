"""Rewrite the text between a mark and `<!-- end -->` in the pages of docs from the docstrings of the code.

<!-- fields of NAME -->                  every field of the config NAME
<!-- fields of NAME beyond OTHER -->     of its sections that OTHER's config does not have, or has otherwise
<!-- statuses -->                        exit statuses of commands, ranks and jobs
<!-- metrics -->                         the metrics of a run
<!-- commands -->                        the commands of mcore-rl
<!-- flags of speed -->                  Megatron-LM's arguments with the fields that stand for them
<!-- flags not offered -->               Megatron-LM's arguments that have none

python tools/document_fields.py           # write what has changed
python tools/document_fields.py --check   # name the pages that would change; status 1 when there are any
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import COMMANDS
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.describe import SectionDoc, describe_sections
from mcore_rl.config.other_names import ARGUMENTS, Argument
from mcore_rl.config.pipeline import PipelineConfig
from mcore_rl.config.section import Section
from mcore_rl.errors import EXIT_STATUSES
from mcore_rl.launch.job import MEANING
from mcore_rl.metrics.metric_table import METRICS

DOCS = Path(__file__).parents[1] / "docs"
MARK = r"fields of (?P<name>\w+)(?: beyond (?P<other>\w+))?|statuses|metrics|commands|flags of speed|flags not offered"
REGION = re.compile(rf"(<!-- (?P<mark>{MARK}) -->\n).*?(<!-- end -->)", re.DOTALL)
CONFIGS: dict[str, type[Section]] = {
    "cluster": ClusterConfig,
    "pipeline": PipelineConfig,
    **{name: program.config for name, program in PROGRAMS.items()},
}


def main(arguments: list[str]) -> int:
    """Return 0, or 1 when `--check` finds a page that differs from the docstrings."""
    changed = []
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = with_one_anchor_each(REGION.sub(lambda region: region[1] + content(region) + "<!-- end -->", before))
        if after != before:
            changed.append(page.relative_to(DOCS))
            if "--check" not in arguments:
                page.write_text(after, encoding="utf-8")
    for name in changed:
        print(f"docs/{name}: its tables are not those of the docstrings; run python tools/document_fields.py")
    return int(bool(changed) and "--check" in arguments)


def with_one_anchor_each(page: str) -> str:
    """Return a page without the anchors of fields that have one further up, such as those of another kind."""
    seen: set[str] = set()

    def kept(anchor: re.Match[str]) -> str:
        is_new = anchor[1] not in seen
        seen.add(anchor[1])
        return anchor[0] if is_new else ""

    return re.sub(r'<a id="([^"]+)"></a>', kept, page)


def content(region: re.Match[str]) -> str:
    """Return the text that belongs into a region."""
    if region["mark"] == "statuses":
        of_commands = ((str(key), "commands, ranks", text) for key, text in EXIT_STATUSES.items())
        of_jobs = ((str(key), "jobs of `mcore-rl launch`", text) for key, text in MEANING.items())
        signals = ("128 + n", "commands, ranks", "ended by signal n: 137 is SIGKILL, often for want of memory")
        rows = sorted([*of_commands, *of_jobs], key=lambda row: (row[1], int(row[0])))
        return table("exit status | whose | meaning", iter([*rows, signals]))
    if region["mark"] == "metrics":
        rows = ((f"{_anchor(name)}`{name}`", row.unit, row.text) for name, row in METRICS.items())
        return table("metric | unit | what it is", rows)
    if region["mark"] == "commands":
        rows = ((f"`mcore-rl {name}`", command.summary) for name, command in COMMANDS.items())
        return table("command | what it does", rows)
    if region["mark"] == "flags of speed":
        flags = (
            (_options(one), f"`{one.field}`", one.on_gpus, one.on_cpus, one.note) for one in ARGUMENTS if one.field
        )
        return table("Megatron-LM | here | on GPUs | on CPUs | what it needs, what is seen", flags)
    if region["mark"] == "flags not offered":
        missing = ((_options(one), one.note) for one in ARGUMENTS if not one.field)
        return table("Megatron-LM | why not", missing)
    sections = describe_sections(CONFIGS[region["name"]])
    known = describe_sections(CONFIGS[region["other"]]) if region["other"] else []
    level = "###" if "\n## " in region.string[: region.start()] else "##"
    return "\n" + "".join(_section(section, level) for section in sections if section.fields and section not in known)


def _options(argument: Argument) -> str:
    return ", ".join(f"`--{name.replace('_', '-')}`" for name in argument.names)


def table(heads: str, rows: Iterator[tuple[str, ...]]) -> str:
    """Return a table in Markdown; `heads` are divided by bars."""
    lines = (f"| {' | '.join(map(_cell, row))} |\n" for row in rows)
    return f"\n| {heads} |\n|{'---|' * (heads.count('|') + 1)}\n{''.join(lines)}\n"


def _anchor(name: str) -> str:
    return f'<a id="{name}"></a>'


def _section(section: SectionDoc, level: str) -> str:
    rows = (
        (
            f"{_anchor(field.key)}`{field.key}`",
            f"`{field.default}`" if field.default else "",
            f"{f'With {field.choice}: ' if field.choice else ''}{field.meaning} ({field.type})",
        )
        for field in section.fields
    )
    title = f"`[{section.key}]`" if section.key else "Top level"
    return f"{level} {title}\n\n{_cell(section.meaning)}\n" + table("field | default | meaning", rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
