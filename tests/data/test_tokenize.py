"""Token shards: what is in them, on how many processes and over which kills they are made, what is refused."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.data.test_templates import HELLO, LLAMA_3
from tests.data.test_text_encoding import LLAMA, opening
from tests.support.commands import environment, trainwright, wait_for
from tests.support.slow import slow_but
from trainwright.cli import data as data_tokens
from trainwright.data.check import check_corpus
from trainwright.data.rows.texts import TextPiece, iterate_pieces, join_documents
from trainwright.data.sources.reading import read_rows
from trainwright.data.sources.shards import INDEX, Shards
from trainwright.data.tokens.shard_writer import tokenize
from trainwright.data.tokens.token_worker import WordTokens
from trainwright.errors import MachineError, RequestError
from trainwright.models.tokenization import build_bytes_tokenizer, load_trained_tokenizer, make_tokenizer
from trainwright.recipe.sections.data import SourceSection

WORDS = "the quick brown fox jumps over it\n\n  lazily, 12 times — ein Fuchs\nnot a dog's\t\tday\n".splitlines(True)


def text(length: int, seed: int = 0) -> str:
    """So many characters of words, line ends and spaces."""
    chosen = np.random.default_rng(seed).integers(0, len(WORDS), length // 8)
    return "".join(WORDS[i] for i in chosen)[:length].strip() + "\n"


def rows(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return path


def sources(*paths: Path | str, **fields: Any) -> list[tuple[SourceSection, str]]:
    return [(SourceSection(source=str(path), **fields), "data.train") for path in paths]


def made(out: Path, *paths: Path | str, tokenizer: Any = None, **options: Any) -> Shards:
    tokenize(
        sources(*paths), tokenizer or build_bytes_tokenizer(), out, identity=[str(path) for path in paths], **options
    )
    return Shards.open(out)


def documents(shards: Shards) -> list[list[int]]:
    edges = [0, *shards.ends.tolist()]
    return [shards.read(begin, end).tolist() for begin, end in itertools.pairwise(edges)]


def test_documents_are_there_whole_in_order_and_ended(tmp_path: Path) -> None:
    texts = ["a", "zwei\n\nZeilen", "é" * 5, "last"]
    shards = made(tmp_path / "out", rows(tmp_path / "rows.jsonl", texts), shard_tokens=8)
    assert documents(shards) == [[*one.encode(), 258] for one in texts]
    assert len(shards.files) > 1
    assert shards.about["dtype"] == "uint16"
    assert shards.about["characters"] == sum(map(len, texts))
    assert shards.digests[0] != shards.digests[1]
    assert shards.read(1, 8).tolist() == [258, *b"zwei\n\n"]


def test_a_document_in_the_template_gets_no_second_beginning_or_end(tmp_path: Path) -> None:
    tokenizer = opening(LLAMA, LLAMA_3, "<|end_of_text|>")
    chat = str(tokenizer.apply_chat_template(HELLO, tokenize=False))
    texts = [chat + "\n", "Hello there", "Hello<|end_of_text|>"]
    found = documents(made(tmp_path / "out", rows(tmp_path / "rows.jsonl", texts), tokenizer=tokenizer))
    written = [tokenizer.decode(ids) for ids in found]
    assert written == [chat, "<|begin_of_text|>Hello there<|end_of_text|>", "<|begin_of_text|>Hello<|end_of_text|>"]


def test_a_text_file_is_a_document_and_several_with_separators(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n\nb")
    (tmp_path / "two.txt").write_text("first<|endoftext|>\nsecond<|endoftext|><|endoftext|>third")
    shards = made(tmp_path / "out", tmp_path / "one.txt", tmp_path / "two.txt")
    found = [bytes(ids[:-1]).decode() for ids in documents(shards)]
    assert found == ["a\n\nb", "first", "\nsecond", "third"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", slow_but(2, among=(2, 3)))
def test_any_number_of_processes_writes_the_same(tmp_path: Path, processes: int) -> None:
    file = rows(tmp_path / "rows.jsonl", [text(20_000, seed) for seed in range(200)])
    one = made(tmp_path / "one", file, shard_tokens=1_000_000)
    several = made(tmp_path / "several", file, shard_tokens=1_000_000, processes=processes)
    assert several.about == one.about
    assert several.fingerprint == one.fingerprint
    for name in sorted(path.name for path in (tmp_path / "one").iterdir()):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "several" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", " "], ids=["in lines", "in one line"])
def test_a_large_document_has_the_tokens_that_it_has_at_once(tmp_path: Path, end: str) -> None:
    content = text(700_000).replace("\n", end)
    (tmp_path / "large.txt").write_text(content)
    tokenizer = make_tokenizer(sources(tmp_path / "large.txt"), 400)
    cut = list(iterate_pieces(*sources(tmp_path / "large.txt")[0]))
    assert len(cut) > 2
    assert [piece.first for piece in cut] == [True] + [False] * (len(cut) - 1)
    assert max(len(piece.text) for piece in cut) < 300_000
    (found,) = documents(made(tmp_path / "out", tmp_path / "large.txt", tokenizer=tokenizer))
    whole = tokenizer.backend_tokenizer.encode(content).ids
    assert found == [*whole, tokenizer.eos_token_id]


@pytest.mark.slow
def test_stopped_or_killed_at_any_moment_it_goes_on_without_a_lost_or_repeated_document(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", [f"{number} {text(3_000, number)}" for number in range(1_500)])
    out, whole = tmp_path / "out", made(tmp_path / "whole", file, shard_tokens=200_000)
    options = ["--tokenizer", "bytes", "--shard-tokens", "200000", "--processes", "2"]
    command = [sys.executable, "-m", "trainwright", "data", "tokenize", str(file), "--out", str(out), *options]
    for shards, how, code in ((2, signal.SIGKILL, -9), (5, signal.SIGINT, 75), (9, signal.SIGKILL, -9)):
        started = subprocess.Popen(command, env=environment(), start_new_session=True, stderr=subprocess.PIPE)
        last = out / f"{shards:05d}.tokens"
        wait_for(lambda last=last: last.exists(), every=0.001)  # type: ignore[misc]
        os.killpg(started.pid, how)
        started.communicate()  # ends when the processes that tokenized have ended too
        assert started.returncode == code
        assert not (out / "shards.json").exists()
        with pytest.raises(RequestError, match="is not finished"):
            Shards.open(out)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert f"{whole.token_count:,} tokens" in done.stdout
    found = Shards.open(out)
    assert found.fingerprint == whole.fingerprint
    assert documents(found)[700] == documents(whole)[700]


@pytest.mark.slow
def test_a_position_within_a_document_is_one_to_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.data.tokens.shard_writer._SAVE_SECONDS", 0.0)
    (tmp_path / "large.txt").write_text(text(4_000_000))
    whole = made(tmp_path / "whole", tmp_path / "large.txt")

    def stop(characters: int, tokens: int, documents: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "out", tmp_path / "large.txt", report=stop)
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["pieces"]
    with (tmp_path / "out" / "00000.tokens").open("ab") as file:
        file.write(b"what was not noted")
    found = made(tmp_path / "out", tmp_path / "large.txt")
    assert (found.fingerprint, found.digests.tolist()) == (whole.fingerprint, whole.digests.tolist())


def test_what_was_stopped_before_anything_was_noted_begins_anew(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", ["one", "two"])

    def stop(characters: int, tokens: int, documents: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "out", file, report=stop)
    assert documents(made(tmp_path / "out", file)) == [[*b"one", 258], [*b"two", 258]]


def test_of_a_text_that_is_wrong_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blank.txt").write_bytes(b" ")
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(RequestError, match="has no text"):
            made(tmp_path / name, tmp_path / "blank.txt")
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "there").iterdir())
    # What was safely written is kept: a source that could not be had may be had the next time.
    monkeypatch.setattr("trainwright.data.tokens.shard_writer._SAVE_SECONDS", 0.0)
    (tmp_path / "wrong.txt").write_bytes(text(4_000_000).encode() + b"\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        made(tmp_path / "new", tmp_path / "wrong.txt")
    assert json.loads((tmp_path / "new" / "progress.json").read_text())["pieces"]


def test_one_process_at_a_time_writes_into_a_directory(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", ["one", "two"])
    refused: list[bool] = []

    def meanwhile(characters: int, tokens: int, documents: int) -> None:
        with pytest.raises(RequestError, match="out is being written by another process"):
            made(tmp_path / "out", file)
        refused.append(True)

    found = made(tmp_path / "out", file, report=meanwhile)
    assert refused
    assert documents(found) == documents(made(tmp_path / "out", file)) == [[*b"one", 258], [*b"two", 258]]


def test_a_process_that_is_killed_from_outside_ends_the_work_and_it_goes_on(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", [text(20_000, seed) for seed in range(400)])

    def kill(characters: int, tokens: int, documents: int) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(MachineError, match=r"was killed.*fewer --processes"):
        made(tmp_path / "out", file, report=kill, processes=2)
    assert made(tmp_path / "out", file).fingerprint == made(tmp_path / "whole", file).fingerprint


LIMITED = """
import resource, sys
from pathlib import Path
from tests.data.test_tokenize import made
first, large, out = map(Path, sys.argv[1:4])
made(out / "first", first)  # what is imported and kept for good is there now
status = Path("/proc/self/status").read_text().split()
limit = (int(status[status.index("VmData:") + 1]) << 10) + (int(sys.argv[4]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    large.read_bytes()
except MemoryError:
    made(out / "large", large)
"""


@pytest.mark.slow
def test_a_file_larger_than_the_memory_that_a_process_may_have(tmp_path: Path) -> None:
    """It has 64 MiB beside what it begins with, for a file of 256."""
    part = text(1 << 20)
    (tmp_path / "first.txt").write_text(part)
    with (tmp_path / "large.txt").open("w") as opened:
        for _ in range(256):
            opened.write(part)
    command = [sys.executable, "-c", LIMITED, *map(str, (tmp_path / "first.txt", tmp_path / "large.txt", tmp_path))]
    subprocess.run([*command, "64"], env=environment(), check=True)
    shards = Shards.open(tmp_path / "large")
    assert shards.about["characters"] == 256 * len(part)


def test_what_cannot_be_tokenized_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"text\n" * 200_000 + b"\xff\xfe")
    (tmp_path / "zero.txt").write_bytes(b"text\0more")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b" \n\n ")
    made(tmp_path / "shards", rows(tmp_path / "rows.jsonl", ["text"]))
    for name, said in {
        "binary.txt": "binary.txt: not UTF-8 text at byte 1,000,000",
        "zero.txt": "zero.txt: not text: a zero byte at 4",
        "empty.txt": "empty.txt is empty",
        "blank.txt": "blank.txt has no text",
        "none.txt": "none.txt",
        "shards": "shards is already tokenized; use the original text",
    }.items():
        with pytest.raises(RequestError, match=said):
            made(tmp_path / f"out-{name}", tmp_path / name)


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", ["one", "two"])
    out = file / "below"
    with pytest.raises(MachineError, match=f"--out: {out} cannot be written: "):
        data_tokens.tokenize([str(file)], tokenizer="bytes", out=out, processes=1)
    with pytest.raises(MachineError, match=f"--out: {out} cannot be written: "):
        data_tokens.train_tokenizer([str(file)], out=out, vocab_size=257)


def test_shards_that_are_not_whole_are_refused_by_name(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", [text(500, seed) for seed in range(9)])
    shards = made(tmp_path / "out", file, shard_tokens=1_000)
    last = tmp_path / "out" / f"{len(shards.files) - 1:05d}.tokens"
    content = last.read_bytes()
    last.write_bytes(content[:-7])
    with pytest.raises(RequestError, match=rf"{last.name} is cut short: .* of {len(content):,}"):
        Shards.open(tmp_path / "out")
    last.unlink()
    with pytest.raises(RequestError, match=f"{last.name} is missing"):
        Shards.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dtype", "O", "dtype: Input should be 'uint8', 'uint16' or 'uint32'"),
        ("dtype", "int16", "dtype: Input should be"),
        ("dtype", "V2", "dtype: Input should be"),
        ("dtype", {"names": ["a"], "formats": ["O"]}, "dtype: Input should be"),
        ("dtype", "uint8", "is longer than it was"),
        ("dtype", "uint32", "is cut short"),
        ("shards", [], "shards: List should have at least 1 item"),
        ("shards", [{"name": "../out/00000", "tokens": 1, "documents": 1}], "shards.0.name: String should match"),
        ("shards", [{"name": "00000", "tokens": -1, "documents": 1}], "shards.0.tokens: Input should be greater"),
        ("shards", [{"name": "00000", "tokens": 1.0, "documents": 1}], "shards.0.tokens: Input should be a valid int"),
        ("tokenizer", None, "tokenizer: Input should be"),
        ("index", [3, 2], "the ends of its documents do not rise to the 8 tokens"),
        ("index", [-1, 8], "the ends of its documents do not rise"),
        ("index", [4, 9], "the ends of its documents do not rise"),
    ],
)
def test_shards_that_say_what_they_do_not_have_are_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    out = tmp_path / "out"
    made(out, rows(tmp_path / "rows.jsonl", ["one", "two"]))
    if key == "index":
        index = np.fromfile(out / "00000.index", dtype=INDEX)
        index["end"] = value
        index.tofile(out / "00000.index")
    else:
        about = json.loads((out / "shards.json").read_text())
        (out / "shards.json").write_text(json.dumps({**about, key: value}))
    with pytest.raises(RequestError) as refused:
        Shards.open(out)
    assert said in str(refused.value) and str(out) in str(refused.value)


def test_shards_nested_without_end_are_refused(tmp_path: Path) -> None:
    out, file = tmp_path / "out", rows(tmp_path / "rows.jsonl", ["one", "two"])
    made(out, file)
    for name in ("shards.json", "progress.json"):
        (out / "shards.json").unlink(missing_ok=True)
        (out / name).write_text('{"version": ' + "[" * 100_000)
        with pytest.raises(RequestError, match=f"{name}: nested more than"):
            made(out, file)
        if name == "shards.json":
            with pytest.raises(RequestError, match=f"{name}: nested more than"):
                Shards.open(out)
    (out / "progress.json").write_text("[]")
    with pytest.raises(RequestError, match="does not say how far"):
        made(out, file)


def test_pointers_in_shards_end_check_and_training_with_2(tmp_path: Path) -> None:
    """Read as Python objects, the tokens would be addresses, and end the process by a signal."""
    out = tmp_path / "out"
    made(out, rows(tmp_path / "rows.jsonl", ["some text of a document"] * 8))
    about = json.loads((out / "shards.json").read_text())
    (out / "shards.json").write_text(json.dumps({**about, "dtype": "O"}))
    for shard in about["shards"]:
        (out / f"{shard['name']}.tokens").write_bytes(b"\x41" * 8 * shard["tokens"])
    values: dict[str, Any] = {
        "model": {"tokenizer": "bytes", "config": {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}}
    }
    values |= {"task": "pretrain", "data": {"train": str(out), "validation": None, "max_length": 16}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**values, "train": {"max_steps": 1}}))
    for command in (("recipe", "check"), ("train",)):
        ended = trainwright(*command, "recipe.yaml", "parallel.num_processes=1", cwd=tmp_path)
        assert ended.returncode == 2 and f"{out / 'shards.json'}: dtype: " in ended.stderr, ended.stderr


def test_shards_of_another_tokenizer_and_of_another_text_are_refused(tmp_path: Path) -> None:
    file = rows(tmp_path / "rows.jsonl", [text(5_000, seed) for seed in range(9)])
    shards = made(tmp_path / "out", file)
    other = make_tokenizer(sources(file), 300)
    with pytest.raises(RequestError, match=r"another tokenizer .*259 tokens.*300 tokens"):
        shards.check_tokenizer(other)
    shards.check_tokenizer(build_bytes_tokenizer())
    with pytest.raises(RequestError, match="shards of another text or tokenizer"):
        made(tmp_path / "out", file, tokenizer=other)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("")
    with pytest.raises(RequestError, match="has other files"):
        made(tmp_path / "taken", file)


def test_a_corpus_is_checked_as_it_is_trained_on_and_is_no_rows(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one\n\ntwo<|endoftext|>three")
    (tmp_path / "wrong.txt").write_bytes(b"one\xff")
    shards = made(tmp_path / "out", tmp_path / "text.txt")
    for name in ("text.txt", "out"):
        ((source, key),) = sources(tmp_path / name)
        checked = check_corpus(source, build_bytes_tokenizer(), key=key)
        assert (checked.examples, checked.tokens) == (2, shards.token_count)
        assert checked.lines(64) == [f"{source.source}: 2 documents, 15 tokens"]
    ((source, key),) = sources(tmp_path / "wrong.txt")
    (problem,) = check_corpus(source, build_bytes_tokenizer(), key=key).problems
    assert "wrong.txt: not UTF-8 text at byte 3" in problem
    with pytest.raises(RequestError, match="has token shards, which only task pretrain reads"):
        read_rows(str(tmp_path / "out"))


def test_a_tokenizer_of_characters_has_those_of_its_text_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("hello\nworld")
    (tmp_path / "other.txt").write_text("hello moon")
    name = f"characters:{tmp_path / 'text.txt'}"
    tokenizer = load_trained_tokenizer(name)
    assert len(tokenizer) == len(set("hello\nworld"))
    shards = made(tmp_path / "out", tmp_path / "text.txt", tokenizer=tokenizer)
    assert shards.about["dtype"] == "uint8"
    assert tokenizer.decode(shards.read(0, shards.token_count)) == "hello\nworld"
    with pytest.raises(RequestError, match=r"other\.txt: document 1: the tokenizer has no token for ' '"):
        made(tmp_path / "other", tmp_path / "other.txt", tokenizer=load_trained_tokenizer(name))


def test_rows_of_turns_become_their_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "x", "answer": "y"}\n')
    found = list(iterate_pieces(SourceSection(source=str(tmp_path / "rows.jsonl"), limit=1), "data.train"))
    assert found == [TextPiece(f"{tmp_path / 'rows.jsonl'}:1", "1 + 1?\n\n2", True, True)]


def test_an_article_of_a_corpus_of_lines_is_a_document() -> None:
    lines = ["", " = One = \n", "", " A text with x = 1 = \n", " = Not a title , as no line is free = \n", ""]
    lines += [" = = Section = = \n", "", " More . \n", "", " = Two = \n", "", " End . \n"]
    rows = [(str(number), {"text": line}) for number, line in enumerate(lines, 1)]
    found = list(join_documents("wikitext", iter(rows)))
    assert [place for place, _ in found] == ["1", "2", "11"]
    assert found[1][1]["text"].startswith(" = One = \n\n A text") and found[1][1]["text"].endswith(" More . \n\n")
    assert found[2][1]["text"] == " = Two = \n\n End . \n"
    assert list(join_documents("tinystories", iter(rows))) == rows


@pytest.mark.slow
def test_the_standard_library_is_a_corpus() -> None:
    found = list(iterate_pieces(SourceSection(source="stdlib", limit=3), "data.train"))
    assert sum(piece.last for piece in found) == 3
    assert any("import" in piece.text for piece in found)


def test_words_that_were_seen_give_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text(100_000))
    tokenizer = make_tokenizer(sources(tmp_path / "text.txt"), 500).backend_tokenizer
    llamas = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    cut = tokenizers.Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    steps = [
        tokenizers.pre_tokenizers.Split(cut, "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    llamas.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    odd = "Ünïcode  \t\n\n 12345's it'S — 漢字\r\n🙂🙂 <|endoftext|> \u00a0x\u2028y" * 3
    for backend in (tokenizer, llamas, build_bytes_tokenizer().backend_tokenizer):
        tokens = WordTokens(backend)
        for one in (text(5_000, 1), odd, odd.replace("<|endoftext|>", ""), text(5_000, 2), ""):
            assert tokens(one).tolist() == backend.encode(one, add_special_tokens=False).ids
