"""No text of a model or of data reaches a terminal as a command."""

from mcore_rl.errors import escaped
from mcore_rl.rl.rollouts.evaluation import table_lines


def test_control_characters_are_escaped_and_newline_and_tab_stay():
    text = "a\x1b[2J\tb\n\x1b]0;title\x07\r\x9b31mé漢\x7f"
    assert escaped(text) == "a\\x1b[2J\tb\n\\x1b]0;title\\x07\\x0d\\x9b31mé漢\\x7f"


def test_the_table_of_samples_shows_no_control_characters():
    sample = {"reward": 1.0, "prompt": "\x1b[2J", "completion": "\x1b]0;title\x07", "answer": "\x08"}
    (line,) = table_lines([sample], 1)
    assert line == r"reward  1.000 | prompt \x1b[2J | completion \x1b]0;title\x07 | answer \x08"
