import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.console import Console

from mcore_rl.checks.inputs import contents_of_inputs, inputs_of
from mcore_rl.cli.cli import main
from mcore_rl.config.changes import with_contents
from mcore_rl.config.data import DataConfig, TokenizerConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.megatron.preprocess import ENDINGS, preprocess
from mcore_rl.errors import DataError
from tests.ranks import forkserver
from tests.unit.data.conftest import preprocessing

TOOL = Path(__file__).parents[3] / "tools" / "preprocess.py"
EOD = 2


@pytest.fixture
def options(corpus, tokenizer, tmp_path):
    return preprocessing(tokenizer, tmp_path / "out" / "data.v1", corpus)


def run(options):
    said = StringIO()
    preprocess(options, Console(file=said))
    return said.getvalue()


def files(prefix):
    return {ending: Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS}


def events(prefix):
    return [json.loads(line) for line in Path(f"{prefix}.log.jsonl").read_text().splitlines()]


def command(options):
    inputs = [str(path) for path in options.inputs]
    tokenizer = ["--tokenizer", options.tokenizer.path]
    return [sys.executable, str(TOOL), *inputs, "--output", str(options.output), *tokenizer]


def as_a_program(words, output, limit_bytes):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    sys.exit(main(["data", "preprocess", *words]))


def start(options, output, limit_bytes=None):
    """The command as a process that began with Megatron in memory; `output` gets what it writes."""
    process = forkserver().Process(target=as_a_program, args=(command(options)[2:], output, limit_bytes))
    process.start()
    return process


@pytest.fixture(scope="module")
def reference(corpus, tokenizer, tmp_path_factory):
    """The three files, made by one worker without interruption."""
    output = tmp_path_factory.mktemp("reference") / "data"
    run(preprocessing(tokenizer, output, corpus))
    return output


def test_megatron_reads_back_each_document_token_for_token(reference, documents, tokenizer):
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    dataset = IndexedDataset(str(reference))
    assert len(dataset) == len(documents)
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    for tokens, text in zip((dataset[i] for i in range(len(dataset))), documents, strict=True):
        assert tokens.tolist() == [*model.encode(text), EOD]


def test_the_sidecar_tells_what_is_in_the_files(reference, corpus, tokenizer, documents):
    sidecar = json.loads(files(reference)[".json"])
    dataset = IndexedDataset(str(reference))  # kept: its arrays are views of memory that it unmaps at its end
    tokens = [int(token) for i in range(len(documents)) for token in dataset[i]]
    assert sidecar["tokens"] == len(tokens)
    assert sidecar["max_token_id"] == max(tokens)
    assert sidecar["documents"] == len(documents)
    assert (sidecar["vocab_size"], sidecar["eod_id"], sidecar["bad_lines"]) == (400, EOD, 0)
    assert sidecar["sources"] == [{"path": str(corpus), "num_bytes": corpus.stat().st_size}]


def test_the_bytes_do_not_depend_on_the_number_of_workers_and_nothing_else_is_left(options, reference):
    run(replace(options, workers=3))
    assert files(options.output) == files(reference)
    assert events(options.output)[0]["shards"] > 3
    names = sorted(path.name for path in options.output.parent.iterdir())
    assert names == ["data.v1.bin", "data.v1.idx", "data.v1.json", "data.v1.log.jsonl"]


def kill_after_first_shard(options, output):
    """Whether SIGKILL met the run with some shards done and others not; its workers end with it."""
    done = Path(f"{options.output}.partial") / "shard-000000.done"
    process = start(options, output)
    workers = []
    while process.is_alive() and not done.exists():
        time.sleep(0.002)
    if process.is_alive():
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert alive == []
    return process.exitcode == -signal.SIGKILL and done.exists()


def test_a_killed_run_goes_on_where_it_was_and_gives_the_same_bytes(options, reference, tmp_path):
    for _ in range(5):
        if kill_after_first_shard(options, tmp_path / "output"):
            break
        shutil.rmtree(options.output.parent)
    else:
        pytest.fail("the run ended before it could be killed, five times")
    assert not any(Path(f"{options.output}{ending}").exists() for ending in ENDINGS)
    run(options)
    assert files(options.output) == files(reference)
    finished = [event["finished"] for event in events(options.output) if event["event"] == "tokenizing"]
    assert finished[0] == 0 < finished[1]


def stop_before_the_end(options):
    """Leaves PREFIX.partial with the plan and all shards of a run that may have no bad line."""
    with pytest.raises(DataError, match="--max-bad allows a share of 0"):
        run(replace(options, max_bad=0))
    return Path(f"{options.output}.partial")


@pytest.fixture
def cut(options, corpus, tmp_path):
    """Options of a small input that ends inside a line."""
    (tmp_path / "cut.jsonl").write_bytes(corpus.read_bytes()[:20_000])
    return replace(options, inputs=(tmp_path / "cut.jsonl",), max_bad=0.5)


@pytest.mark.matrix("moved0")
@pytest.mark.parametrize("moved", [(), (".bin",), (".bin", ".idx")])
def test_a_run_killed_while_it_moved_its_files_is_ended_by_the_next(cut, tmp_path, moved):
    whole = replace(cut, output=tmp_path / "whole")
    run(whole)
    partial = stop_before_the_end(cut)
    for ending in ENDINGS:
        place = f"{cut.output}{ending}" if ending in moved else partial / f"merged{ending}"
        shutil.copy(f"{whole.output}{ending}", place)
    for shard in partial.glob("shard-*"):
        shard.unlink()  # nothing is tokenized again
    run(cut)
    assert files(cut.output) == files(whole.output)
    assert not partial.exists()


@pytest.mark.full
def test_a_part_that_was_damaged_before_the_run_went_on_is_not_joined(cut):
    shard = stop_before_the_end(cut) / "shard-000000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-000000\.bin is not as it was written\. Delete .*data\.v1\.partial"):
        run(cut)
    shutil.rmtree(shard.parent)
    run(cut)


@pytest.mark.full
def test_data_made_anew_with_the_same_lengths_is_other_data_to_a_run(options, corpus, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_bytes(corpus.read_bytes()[:20_000].replace(b" 1984 ", b" 1985 "))
    options = replace(options, inputs=(text,), max_bad=0.5)
    config = PretrainConfig(data=DataConfig(train=(str(options.output),)))
    run(options)
    before, index = contents_of_inputs(inputs_of(config)), files(options.output)[".idx"]
    text.write_bytes(corpus.read_bytes()[:20_000])
    run(replace(options, overwrite=True))
    assert files(options.output)[".idx"] == index
    (change,) = with_contents([], before, contents_of_inputs(inputs_of(config)))
    assert change.breaks_exactness and f"{options.output}.bin with " in str(change)


@pytest.mark.full
def test_an_existing_dataset_is_kept_unless_overwriting_is_asked_for(options, reference, corpus, tmp_path):
    run(options)
    less = tmp_path / "less.jsonl"
    less.write_bytes(b"".join(corpus.read_bytes().splitlines(keepends=True)[:50]))
    with pytest.raises(DataError, match=r"data\.v1\.bin.*exist already.*--overwrite"):
        run(replace(options, inputs=(less,)))
    assert files(options.output) == files(reference)
    run(replace(options, inputs=(less,), overwrite=True))
    assert len(IndexedDataset(str(options.output))) == 50


@pytest.mark.full
def test_an_unfinished_run_with_other_input_is_not_mixed_in(cut, corpus, tmp_path):
    stop_before_the_end(cut)
    cut.inputs[0].write_bytes(corpus.read_bytes()[20_000:].split(b"\n", 1)[1])
    with pytest.raises(DataError, match=r"unfinished run with another sources"):
        run(cut)
    run(replace(cut, overwrite=True))
    whole = replace(cut, output=tmp_path / "whole")
    run(whole)
    assert files(cut.output) == files(whole.output)


BAD = b'{"text": "good one"}\n{"text": "a\n\n{"id": 1}\n{"text": "\xff"}\n{"text": ""}\n{"text": "good two"}\n'


def test_bad_lines_are_left_out_counted_and_told_with_file_and_line(options, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(BAD)
    said = run(replace(options, inputs=(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), workers=2, max_bad=1))
    assert len(IndexedDataset(str(options.output))) == 4
    assert json.loads(files(options.output)[".json"])["bad_lines"] == 8
    reported = [(e["path"], e["line"]) for e in events(options.output) if e["event"] == "bad line"]
    assert reported == [(str(tmp_path / name), line) for name in ("a.jsonl", "b.jsonl") for line in (2, 4, 5, 6)]
    assert "8 bad lines were left out" in said
    assert f"{tmp_path}/b.jsonl:4: no key 'text' (keys: id)" in said


@pytest.mark.full
def test_line_numbers_count_on_over_shards(options, corpus, tmp_path):
    lines = corpus.read_bytes().splitlines(keepends=True)
    bad = [0, 100, 350, 699]
    for index in bad:
        lines[index] = b"bad\n"
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    run(replace(options, inputs=(tmp_path / "bad.jsonl",), workers=2))
    assert [e["line"] for e in events(options.output) if e["event"] == "bad line"] == [i + 1 for i in bad]
    assert len(IndexedDataset(str(options.output))) == len(lines) - len(bad)


def test_a_larger_share_of_bad_lines_than_one_in_a_hundred_ends_the_run_and_a_higher_limit_goes_on(options, tmp_path):
    lines = [b'{"text": "good"}\n'] * 99
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines, b'{"text": "cut o']))
    run(replace(options, inputs=(tmp_path / "a.jsonl",), output=tmp_path / "one in a hundred"))
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines[1:], b'{"text": "cut o']))
    options = replace(options, inputs=(tmp_path / "a.jsonl",))
    share = r"1 of 99 documents are bad, and --max-bad allows .* 0\.01(.|\n)*a\.jsonl:99: not"
    with pytest.raises(DataError, match=share):
        run(options)
    assert not options.output.with_suffix(".v1.bin").exists()
    run(replace(options, max_bad=0.02))
    assert len(IndexedDataset(str(options.output))) == 98


def test_plain_text_is_a_document_a_file(options, tokenizer, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one\n\ntwo\n")
    (texts / "b.txt").write_text("three\n")
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    run(replace(options, inputs=(texts,), document_format=DocumentFormat(kind="text")))
    dataset = IndexedDataset(str(options.output))
    assert [model.decode(dataset[i].tolist()[:-1]) for i in range(len(dataset))] == ["one\n\ntwo\n", "three\n"]


@pytest.mark.full
def test_a_disk_that_fills_up_leaves_nothing_under_the_name_and_the_run_goes_on_later(options, reference, tmp_path):
    # Smaller than a shard: any write beyond it fails.
    process = start(options, tmp_path / "output", limit_bytes=64 << 10)
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 2 and "File too large" in output and "it resumes" in output
    assert "Traceback" not in output
    assert not any(Path(f"{options.output}{ending}").exists() for ending in ENDINGS)
    run(options)
    assert files(options.output) == files(reference)


def test_a_second_writer_is_refused(options):
    partial = Path(f"{options.output}.partial")
    partial.mkdir(parents=True)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, 2); print(1, flush=True); input()"
    program = [sys.executable, "-c", hold, str(partial / "lock")]
    holder = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    started = time.monotonic()
    with pytest.raises(DataError, match="has another writer"):
        run(options)
    assert time.monotonic() - started < 300
    holder.communicate(b"\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": (Path("absent.jsonl"),)}, "does not exist"),
        ({"workers": 0}, "wanted at least 1"),
        ({"output": Path("/proc/absent/x")}, r"/proc/absent/x.partial cannot be made: .* Or give another output"),
        (
            {"document_format": DocumentFormat(kind="jsonl", key="body")},
            r"no document in 1 files \(700 bad lines.*--key",
        ),
    ],
)
def test_settings_that_make_no_dataset_are_refused(options, changes, message):
    with pytest.raises(DataError, match=message):
        run(replace(options, **changes))


@pytest.mark.parametrize("folder", [".", "", "..", "data/.."])
def test_an_output_without_a_name_is_refused(options, folder, tmp_path, monkeypatch):
    """Its files would be `..bin` and `..idx`, which no listing shows."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is a folder and no prefix of files"):
        run(replace(options, output=Path(folder)))
    assert list(tmp_path.iterdir()) == []


def test_the_tool_tells_an_error_without_a_traceback(options, tmp_path, monkeypatch, capsys):
    wrong = replace(options, tokenizer=TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "no.model")))
    monkeypatch.setattr(sys, "argv", command(wrong)[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("DataError: data.tokenizer.path")


@pytest.mark.full
@pytest.mark.parametrize("tool", ["preprocess", "train_tokenizer", "python_corpus"])
def test_help_shows_an_example_and_imports_no_torch(tool):
    code = f"import sys, runpy; sys.argv = ['{tool}', '--help']\n" + (
        f"try: runpy.run_path({str(TOOL.with_name(tool + '.py'))!r}, run_name='__main__')\n"
        "except SystemExit: assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    commands = {"preprocess": "mcore-rl data preprocess", "train_tokenizer": "mcore-rl data tokenizer"}
    assert f"example:\n  {commands.get(tool, f'python tools/{tool}.py')} " in done.stdout


@pytest.mark.full
def test_one_flipped_bit_of_a_dataset_is_found_without_a_second_copy(options, capsys):
    run(options)
    written = files(options.output)
    sidecar = json.loads(written[".json"])
    assert sidecar["bin_crc32"] == f"{zlib.crc32(written['.bin']):08x}"
    assert sidecar["idx_crc32"] == f"{zlib.crc32(written['.idx']):08x}"
    assert main(["check", str(options.output)]) == 0
    assert main(["check", f"{options.output}.bin"]) == 0
    assert capsys.readouterr().out.count("as written (CRC-32)") == 4
    for ending in ENDINGS:
        file = Path(f"{options.output}{ending}")
        # The first byte of JSON: any other may only change the value of a field that says nothing of the bytes.
        at = 0 if ending == ".json" else len(written[ending]) // 2
        file.write_bytes(written[ending][:at] + bytes([written[ending][at] ^ 1]) + written[ending][at + 1 :])
        assert main(["check", str(options.output)]) == 1
        assert f"files: {file.name}. Take another copy." in capsys.readouterr().out.replace("\n", " ")
        file.write_bytes(written[ending])
    Path(f"{options.output}.json").unlink()
    assert main(["check", str(options.output)]) == 0
    assert "nothing was recorded when it was written" in capsys.readouterr().out


@pytest.mark.full
def test_tokenizers_and_datasets_in_a_folder_of_texts_are_not_read(tokenizer, tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    for name in ("a", "b"):
        (books / f"{name}.txt").write_text(f"etao {name}")
    options = preprocessing(tokenizer, tmp_path / "all", books, document_format=DocumentFormat(kind="text"))
    run(options)
    shutil.copy(tokenizer.path, books / "tokenizer.model")
    for path in tmp_path.glob("all.*"):
        shutil.copy(path, books)
    run(replace(options, output=tmp_path / "again"))
    assert files(tmp_path / "again") == files(tmp_path / "all")
    assert len(IndexedDataset(str(tmp_path / "again"))) == 2
