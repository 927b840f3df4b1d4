"""Help for the fields of a config."""

import functools
import shutil
import textwrap

from mcore_rl.config.describe import describe_sections
from mcore_rl.config.kinds import KINDS


def fields_help(kind: str) -> str:
    """Return help for every field of the config `kind`, a name in KINDS, by section: key, default, type, meaning."""
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    wrap = functools.partial(textwrap.wrap, width=width, break_on_hyphens=False)
    paragraphs = ["The fields of CONFIG, with their defaults:"]
    for section in describe_sections(KINDS[kind]):
        title = f"[{section.key}]  {section.meaning}" if section.key else section.meaning
        lines = wrap(title)
        for doc in section.fields:
            kinds = f"    with kind {doc.choice}" if doc.choice else ""
            lines.append(f"  {doc.key} = {doc.default}    ({doc.type}){kinds}")
            lines += wrap(doc.meaning, initial_indent=" " * 6, subsequent_indent=" " * 6)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
