from mcore_rl.config.describe import describe, describe_sections
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.section import Section


class Base(Section):
    inherited: int = 1
    """Of the
    base."""


class Derived(Base):
    silent: int = 2
    own: int = 3
    """Its own."""


def test_every_field_says_what_it_means():
    assert [doc.key for doc in describe(PretrainConfig) if not doc.meaning] == []
    assert [doc.key for doc in describe_sections(PretrainConfig) if not doc.meaning] == []


def test_fields_are_described_by_dotted_key_type_default_and_meaning():
    docs = {doc.key: doc for doc in describe(PretrainConfig)}
    top_k = docs["model.moe.top_k"]
    assert (top_k.type, top_k.default) == ("an integer > 0", "2")
    assert top_k.meaning == "Number of experts that a token is sent to."
    assert docs["optim.schedule"].type == 'one of "cosine", "linear", "wsd", "constant"'
    assert docs["data.split"].default == "[98.0, 1.0, 1.0]"


def test_the_described_defaults_are_the_defaults():
    overrides = [f"{doc.key}={doc.default}" for doc in describe(PretrainConfig)]
    assert load_config(PretrainConfig, None, overrides) == PretrainConfig()


def test_the_meaning_of_a_field_is_the_string_under_it_where_there_is_one():
    assert [(doc.key, doc.meaning) for doc in describe(Derived)] == [
        ("inherited", "Of the\nbase."),
        ("silent", ""),
        ("own", "Its own."),
    ]
