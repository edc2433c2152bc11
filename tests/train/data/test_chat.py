"""Chat data: templates, which tokens are targets, token files, and runs on any number of ranks, exactly resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat_data import (
    MARKED,
    OPEN_ENDED,
    QWEN_LIKE,
    WITH_TOOLS,
    conversations,
    write_chat_tokenizer,
    write_conversations,
)
from tests.ranks import run_ranks
from tests.steps import done, records_of, same, state_of, trainer

from mxep.cli import main
from mxep.models.loss import IGNORE
from mxep.train.config import TrainConfig
from mxep.train.data import chat
from mxep.train.data.chat import ChatRows
from mxep.train.data.corpus import NO_TARGET, Corpus, StreamWriter
from mxep.train.data.loader import TrainingSequences, load_corpus
from mxep.train.data.text_files import read_file
from mxep.train.data.tokenizer import ByteTokenizer, FileTokenizer
from mxep.train.data.tokenizer_export import publish_tokenizer
from mxep.train.rank_launcher import start_ranks
from mxep.train.resolved_config import resolve

pytest.importorskip("transformers")

TURNS = [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * 2, ["hi", "yes.", "why?", "no."], strict=True)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "cache"))


def rows_of(folder: Path, template: str = QWEN_LIKE, **options: Any) -> ChatRows:
    return ChatRows(FileTokenizer(write_chat_tokenizer(folder, template)), **options)


def parts_of(rows: ChatRows, row: dict[str, Any], tokenizer: FileTokenizer) -> list[tuple[bool, str]]:
    """(whether they are targets, text) of the runs of equal tokens in a row's document."""
    (ids,) = rows.encode_all([rows.document(row, "here")])
    found: list[tuple[bool, str]] = []
    for token in ids.tolist():
        trained, text = token < NO_TARGET, tokenizer.text_of(token & (NO_TARGET - 1))
        if found and found[-1][0] == trained:
            text = found.pop()[1] + text
        found.append((trained, text))
    return found


def test_the_assistants_tokens_are_targets(tmp_path: Path) -> None:
    """With a template that marks them, and with one that marks nothing and renders the last message differently."""
    user = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("hi", "why?")]
    for template, answers, end in (
        (MARKED, ("yes.<|im_end|>", "no.<|im_end|>"), "\n"),
        (QWEN_LIKE, ("yes.<|im_end|>\n", "<think>\n\n</think>\n\nno.<|im_end|>\n"), ""),
    ):
        rows = rows_of(tmp_path / "tokenizer", template)
        tokenizer = FileTokenizer(tmp_path / "tokenizer")
        wanted = [(False, user[0]), (True, answers[0]), (False, end + user[1]), (True, answers[1]), (False, end)]
        assert parts_of(rows, {"messages": TURNS}, tokenizer) == [part for part in wanted if part[1]]
        pair = {"prompt": "why?", "completion": "no."}
        assert parts_of(rows, pair, tokenizer)[-len(end) - 1 :] == [part for part in wanted[-2:] if part[1]]
        whole = rows_of(tmp_path / "tokenizer", template, assistant_only_loss=False, field="turns")
        text = "".join(text for _, text in wanted)
        assert parts_of(whole, {"turns": TURNS}, tokenizer) == [(True, text)]
        assert whole.fingerprint != rows.fingerprint


def test_values_that_a_row_passes_to_its_template(tmp_path: Path) -> None:
    """Tools as objects or as JSON, and the template's values; with and without masks."""
    tools = [{"name": "weather"}]
    for only_answers in (True, False):
        rows = rows_of(tmp_path, WITH_TOOLS, assistant_only_loss=only_answers)
        plain, *others = (
            "".join(text for _, text in parts_of(rows, {"messages": TURNS, **beside}, FileTokenizer(tmp_path)))
            for beside in (
                {"tools": "null"},
                {"tools": tools},
                {"tools": json.dumps(tools)},
                {"tools": None, "chat_template_kwargs": {"greeting": "hey "}},
            )
        )
        assert others == [f"tools weather\n{plain}", f"tools weather\n{plain}", f"hey {plain}"]
    assert rows.columns(["tools", "messages", "id", "chat_template_kwargs"], "here") == ["messages", "tools", "chat_template_kwargs"]


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """transformers takes it for rows with tools; that one alone decides whether they have marks, and token files name both."""
    folder, rows = tmp_path / "tokenizer", rows_of(tmp_path / "tokenizer", MARKED)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    several = ChatRows(FileTokenizer(folder))
    assert several.document({"messages": TURNS}, "here") == rows.document({"messages": TURNS}, "here")
    with_tools, alone = {"messages": TURNS, "tools": [{"name": "weather"}]}, rows_of(tmp_path / "alone", WITH_TOOLS)
    assert several.document(with_tools, "here") == alone.document(with_tools, "here")
    assert several.fingerprint != rows.fingerprint
    assert "additional_chat_templates/tool_use.jinja" in publish_tokenizer(str(folder), FileTokenizer(folder).fingerprint).files


def test_parts_of_text_are_one_content(tmp_path: Path) -> None:
    """Templates that want strings leave lists out."""
    for template in (QWEN_LIKE, MARKED):
        rows = rows_of(tmp_path, template)
        parts = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
        cut = [*parts[:-1], {"role": "assistant", "content": [{"type": "text", "text": "n"}, {"type": "text", "text": "o."}]}]
        for messages in (parts, cut):
            assert rows.document({"messages": messages}, "here") == rows.document({"messages": TURNS}, "here")


def test_the_result_of_a_tool_is_for_the_template(tmp_path: Path) -> None:
    """As Llama 3.1's, which writes objects as JSON; none of their values is lost."""
    rows = rows_of(tmp_path, "{%- for m in messages %}{{- m.content if m.content is string else m.content | tojson }}{%- endfor %}")
    rows.assistant_only_loss = False
    for content in ({"text": "Rome", "b": "seven"}, [{"text": "a", "c": "three"}]):
        ((_, text),) = parts_of(rows, {"messages": [{"role": "tool", "content": content}]}, FileTokenizer(tmp_path))
        assert "seven" in text or "three" in text


@pytest.mark.parametrize("only_answers", [True, False])
def test_a_conversation_that_the_template_leaves_out(only_answers: bool, tmp_path: Path) -> None:
    """It is no document."""
    template = "{%- for m in messages if m.role != 'system' %}{{- m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor %}"
    rows = rows_of(tmp_path / "tokenizer", template, assistant_only_loss=only_answers)
    file = write_conversations(tmp_path / "data.jsonl", [[{"role": "system", "content": "hi"}], TURNS])
    assert list(read_file(file, rows)) == [rows.document({"messages": TURNS}, "here")]


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    """JSON can escape it, and UTF-8 does not have it; whole pairs stay. Texts and conversations are alike."""
    for escaped, text in (("a\\ud83d", "a?"), ("\\uDC00b", "?b"), ("\\ud83d\\ude00", "\U0001f600")):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{escaped}", "{escaped}": 1}}')
        assert list(read_file(tmp_path / "a.jsonl")) == [text.encode()]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}).replace("yes.", "yes\\ud83d"))
    wanted = [*TURNS[:1], {"role": "assistant", "content": "yes?"}, *TURNS[2:]]
    rows = rows_of(tmp_path)
    assert list(read_file(tmp_path / "a.jsonl", rows)) == [rows.document({"messages": wanted}, "here")]


def test_a_converted_run_stops_at_the_end_of_a_turn(tmp_path: Path, one_rank: None) -> None:
    """Conversations have no EOS; a run on plain text knows no other."""
    run = trainer(0, 1, str(tmp_path / "run"), **options_of(tmp_path, batch=4, model="qwen3_debug_cpu"))
    done(run)
    run.save()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--drop-expert-bias"]) == 0
    eos = FileTokenizer(tmp_path / "hf").special_token("eos_token")
    (turn,) = ChatRows(FileTokenizer(tmp_path / "hf")).template.end_of_turn()
    for name, wanted in (("config", eos), ("generation_config", [eos, turn])):
        assert json.loads((tmp_path / "hf" / f"{name}.json").read_text())["eos_token_id"] == wanted


def test_a_tokenizer_without_its_template_is_still_written(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    fingerprint = FileTokenizer(folder).fingerprint
    assert publish_tokenizer(str(folder), fingerprint, chat=True).stop_ids
    (folder / "chat_template.jinja").unlink()
    published = publish_tokenizer(str(folder), fingerprint, chat=True)
    assert (published.stop_ids, "tokenizer.json" in published.files) == ((), True)
    assert "without what ends a turn, since its chat template cannot be read any more: chat: " in published.note


def test_the_end_of_a_turn_is_behind_the_content(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_chat_tokenizer(tmp_path / "plain"))
    for template, wanted in ((QWEN_LIKE, ["<|im_end|>"]), (MARKED, ["<|im_end|>"]), (OPEN_ENDED, [])):
        assert [*map(tokenizer.text_of, rows_of(tmp_path / "other", template).template.end_of_turn())] == wanted


def test_a_template_that_hides_its_messages_is_refused(tmp_path: Path) -> None:
    """It shows only the last message; marks or a simpler template help."""
    rows = rows_of(tmp_path, "{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(ValueError, match=r"here: the chat template does not show where the assistant's message 2 is; want one with"):
        rows.document({"messages": TURNS}, "here")
    with pytest.raises(ValueError, match="or a conversation that begins with another role"):
        rows_of(tmp_path, QWEN_LIKE).document({"messages": TURNS[1:]}, "here")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": []}, r"line 2: 'messages' is empty, want a list of messages"),
        ({"messages": "hi"}, "line 2: 'messages' is str, want a list"),
        ({"messages": ["hi"]}, "line 2: message 1 is str, want an object"),
        ({"messages": [*TURNS, {"content": "hi"}]}, r"line 2: message 5 has no role, got \['content'\]"),
        ({"messages": [{"role": "user"}]}, "line 2: message 1 of role 'user' has no content"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "line 2: the chat template failed: TemplateError: no system message here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            r"line 2: message 1 has content .* want a string, or",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "line 2: message 1 has content '5', want a string"),
        ({"messages": [{"role": "user", "content": {"text": "hi"}}]}, "line 2: message 1 has content .* want a string"),
        ({"messages": TURNS, "chat_template_kwargs": {"messages": 1}}, "line 2: 'chat_template_kwargs' has messages, which the trainer"),
        (
            {"messages": TURNS, "chat_template_kwargs": {"truncation": True, "max_length": 4}},
            "line 2: .* has max_length, truncation, which",
        ),
        ({"messages": TURNS, "chat_template_kwargs": {"return_tensors": "pt"}}, "line 2: 'chat_template_kwargs' has return_tensors, which"),
        ({"messages": TURNS, "tools": "{"}, "line 2: 'tools' is no JSON"),
        ({"messages": TURNS, "tools": {"a": 1}}, "line 2: 'tools' is dict, want a list"),
        ({"messages": TURNS, "chat_template_kwargs": [1]}, "line 2: 'chat_template_kwargs' is list, want an object"),
        ({"prompt": "hi", "completion": TURNS}, "line 2: field 'completion' is list, want a string"),
        ({"text": "hi"}, r"line 2 has neither 'messages' nor 'prompt' and 'completion', got fields \['text'\]; --data-field"),
        (["hi"], "line 2 is list, want an object with 'messages'"),
    ],
)
def test_bad_rows_are_named(row: object, says: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in ({"messages": TURNS}, row)))
    with pytest.raises(ValueError, match=f"data.jsonl {says}"):
        load_corpus([str(data)], ByteTokenizer(), 0.5, chat=rows_of(tmp_path / "tokenizer", MARKED))


def test_tokenizers_without_a_template_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_chat_tokenizer(tmp_path / "plain", template=None)
    with pytest.raises(ValueError, match=r"chat: .*plain has no chat template that transformers reads"):
        ChatRows(FileTokenizer(plain))
    with pytest.raises(ValueError, match="chat: got tokens of bytes, want --tokenizer with the folder"):
        start_ranks(TrainConfig(chat=True, device="cpu", out=tmp_path / "run"), [])
    with pytest.raises(ValueError, match="--no-assistant-only-loss without --chat"):
        resolve(TrainConfig(assistant_only_loss=False), "cpu", 1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r'need the transformers library; pip install "\.\[transformers\]"'):
        ChatRows(FileTokenizer(plain))


@pytest.mark.parametrize("change", ["added_tokens.json", "additional_special_tokens"])
def test_tokens_that_only_transformers_knows_are_refused(change: str, tmp_path: Path) -> None:
    """Their ids were beyond the vocabulary: exports left them out, generation never drew them, and cached tokens had other ids."""
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    if change == "added_tokens.json":
        (folder / change).write_text(json.dumps({"<|more|>": FileTokenizer(folder).vocab_size}))
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", change: ["<|more|>"]}))
    with pytest.raises(ValueError, match=r"chat: transformers has tokens that are not in .*json, '<\|more\|>' as 4\d first \(1 in all\)"):
        ChatRows(FileTokenizer(folder))


def test_special_tokens_of_the_configuration_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    """They are tokens of the vocabulary; without the configuration, their names are text of several tokens."""
    folder, found = write_chat_tokenizer(tmp_path / "tokenizer"), []
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    del content["added_tokens"][:2]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for more in ({}, {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **more}))
        rows = ChatRows(FileTokenizer(folder))
        found.append((rows.fingerprint, len(rows.template.encode(TURNS))))
    (before, many), (after, few) = found
    assert many > few
    assert before != after


def test_a_padding_token_of_the_configuration_is_no_reason(tmp_path: Path) -> None:
    folder = write_chat_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "pad_token": "[PAD]"}))
    assert ChatRows(FileTokenizer(folder)).fingerprint


def stream_of(corpus: Corpus) -> list[int]:
    return [*corpus.held_out.tolist(), *corpus.train.tolist()]


def test_where_conversations_begin_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """A template need not separate them, so joined rows may have the same ids, and other masks and positions."""
    rows = rows_of(tmp_path / "tokenizer")
    found = conversations(20)
    split = load_corpus([str(write_conversations(tmp_path / "split.jsonl", found))], ByteTokenizer(), 0.2, chat=rows)
    starts = split.train_starts[::2].copy(), split.held_out_starts
    writer = StreamWriter(rows, lambda *stored: None, lambda text: None)
    joined = writer.corpus(split.train, split.held_out, *starts)
    assert joined.fingerprint != split.fingerprint
    assert writer.corpus(split.train, split.held_out, split.train_starts, split.held_out_starts).fingerprint == split.fingerprint


def test_a_corpus_of_conversations(tmp_path: Path) -> None:
    """Of .jsonl, .parquet and .arrow alike; with masks and without are different token files; each conversation begins a document."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows_alone = [{"messages": TURNS, "tools": None}, {"messages": None, "tools": "[]"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows_alone), tmp_path / "alone.parquet")
    assert len([*read_file(tmp_path / "alone.parquet", rows_of(tmp_path / "tokenizer"))]) == 1, "tools alone are no conversation"
    found = conversations(20)
    found[3][0]["name"] = "me"  # Arrow gives the others a name of None, and calls of tools each other's arguments
    found[4][1]["tool_calls"] = [{"name": "a", "arguments": {"b": "c"}}, {"name": "d", "arguments": {"e": "f"}}]
    jsonl = write_conversations(tmp_path / "data.jsonl", found)
    table = pyarrow.Table.from_pylist([{"messages": messages, "id": 1} for messages in found])
    parquet.write_table(table, tmp_path / "data.parquet")
    with pyarrow.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    rows = rows_of(tmp_path / "tokenizer", WITH_TOOLS)
    corpora = [
        load_corpus([str(tmp_path / name)], ByteTokenizer(), 0.2, chat=rows) for name in ("data.jsonl", "data.parquet", "data.arrow")
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    corpus = corpora[0]
    assert corpus.train.dtype == np.uint32
    assert corpus.num_train_documents + corpus.num_held_out_documents == 20
    start = rows.template.encode(TURNS)[0]
    assert (corpus.train[corpus.train_starts] == start | NO_TARGET).all()
    whole = rows_of(tmp_path / "tokenizer", WITH_TOOLS, assistant_only_loss=False)
    everything = load_corpus([str(jsonl)], ByteTokenizer(), 0.2, chat=whole)
    assert not any(token & NO_TARGET for token in stream_of(everything))
    again = load_corpus([str(jsonl)], ByteTokenizer(), 0.2, chat=rows)
    assert again.fingerprint == corpus.fingerprint != everything.fingerprint
    batch = TrainingSequences(corpus.train, 16, 2, starts=corpus.train_starts).next_batch()
    begin = TrainingSequences(corpus.train, 16, 2).start_of(0)
    window = corpus.train[begin : begin + 17].astype(np.int64)
    assert batch.inputs[0].tolist() == (window[:-1] % NO_TARGET).tolist()
    assert batch.labels[0].tolist() == [IGNORE if token & NO_TARGET else token for token in window[1:].tolist()]
    assert batch.documents is not None


def test_data_without_targets_is_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "tokenizer")
    only_users = write_conversations(tmp_path / "users.jsonl", [messages[:1] for messages in conversations(9)])
    with pytest.raises(ValueError, match="the training conversations have no token of an assistant; check the roles"):
        load_corpus([str(only_users)], ByteTokenizer(), 0.3, chat=rows)
    alone = write_conversations(tmp_path / "alone.jsonl", [TURNS, TURNS])
    with pytest.raises(ValueError, match="all conversations are the same one"):
        load_corpus([str(alone)], ByteTokenizer(), 0.3, chat=rows)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match=r"text\.txt has no rows; conversations are read from \.jsonl, \.parquet, \.arrow"):
        load_corpus([str(tmp_path / "text.txt")], ByteTokenizer(), 0.3, chat=rows)


# ---- runs ----


def options_of(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a run on conversations in `folder`."""
    data = write_conversations(folder / "data.jsonl", conversations(60))
    tokenizer = write_chat_tokenizer(folder / "tokenizer")
    common = {"data": (str(data),), "chat": True, "tokenizer": tokenizer, "recipe": "bf16", "steps": 4, "seq_len": 16, "lr": 1e-3}
    return {**common, **options}


def test_a_run_on_conversations(tmp_path: Path, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is the mean over targets; tokens per second count all; a resumed run has the same bits, and keeps its options."""
    options = options_of(tmp_path, batch=4, balance_loss=0.0)
    run = trainer(0, 1, str(tmp_path / "whole"), **options)
    batch = TrainingSequences(run.corpus.train, 16, 4, seed=0).next_batch()
    with torch.no_grad():
        logits = run.model(batch.inputs).flatten(0, 1)
    chosen = batch.labels.flatten() != IGNORE
    wanted = torch.nn.functional.cross_entropy(logits[chosen], batch.labels.flatten()[chosen])
    assert 0 < chosen.sum() < 40
    record = done(run)
    assert record.loss == pytest.approx(float(wanted), rel=1e-5)
    assert record.valid_tokens == int(chosen.sum())
    assert record.tokens_per_s * record.step_s == pytest.approx(64)
    for _ in range(3):
        done(run)
    halves = trainer(0, 1, str(tmp_path / "halves"), **options, stop_after=2)
    assert not halves.train()
    shown = capsys.readouterr().out
    targets = int((halves.corpus.train < NO_TARGET).sum())
    assert f"chat: {targets:,} of {len(halves.corpus.train):,} training tokens are targets" in shown
    lengths = np.diff(halves.corpus.train_starts, append=len(halves.corpus.train))
    assert f"chat: {(lengths > 16).sum()} of {len(lengths)} conversations are longer than a sequence of 16 tokens and are cut" in shown
    again = trainer(0, 1, str(tmp_path / "halves"), **options, resume=True)
    assert again.train()
    assert len(same(state_of(again), state_of(run))) == len(state_of(run))
    held_out = records_of(tmp_path / "halves", "held_out")
    assert held_out[-1]["nats_per_byte"] is None
    assert TrainConfig.from_json(json.loads(json.dumps(again.config.to_json()))).chat
    with pytest.raises(ValueError, match=r"data was .*, is .*--change data"):
        trainer(0, 1, str(tmp_path / "halves"), **{**options, "steps": 8}, resume=True, assistant_only_loss=False)


def test_a_step_without_a_target_is_skipped(tmp_path: Path, one_rank: None) -> None:
    """It does not change the weights, and the next step trains."""
    run = trainer(0, 1, str(tmp_path / "run"), **options_of(tmp_path, batch=4))
    before, draw = {name: value.clone() for name, value in state_of(run).items()}, run.sequences.next_batch
    run.sequences.next_batch = lambda: draw()._replace(labels=torch.full((4, 16), IGNORE))  # type: ignore[method-assign]
    record = done(run)
    assert record.valid_tokens == 0
    assert np.isnan(record.loss)
    skipped = run.skipped.count(1, record.grad_norm, record.loss, record.valid_tokens)
    assert skipped is not None
    assert (skipped.reason, skipped.in_a_row, skipped.total) == ("none of its tokens is a target", 0, 1)
    assert len(same(state_of(run), before)) == len(before)
    run.sequences.next_batch = draw  # type: ignore[method-assign]
    assert np.isfinite(done(run).loss)


def test_held_out_sequences_without_a_target_are_refused(tmp_path: Path, one_rank: None) -> None:
    users = write_conversations(tmp_path / "users.jsonl", [messages[:1] for messages in conversations(9, seed=1)])
    options = options_of(tmp_path, validation_data=(str(users),))
    with pytest.raises(ValueError, match="no held-out token is a target"):
        trainer(0, 1, str(tmp_path / "run"), **options)
    trainer(0, 1, str(tmp_path / "run"), **options, evaluate=False)


LEGS = (  # four sequences a step; ranks and microbatches have different numbers of targets
    {"ep": 2, "batch": 2},
    {"ep": 2, "batch": 1, "accumulate": 2, "mask_documents": True},
    {"pp": 2, "batch": 4},
    {"tp": 2, "ep": 1, "batch": 4, "mask_documents": True},
)


def figures(rank: int, world: int, out: str, options: dict[str, Any], legs: tuple[dict[str, Any], ...]) -> list[list[float]]:
    """Loss, norm, targets, second loss and held-out loss of each leg."""
    found = []
    for index, leg in enumerate(legs):
        run = trainer(rank, world, f"{out}-{index}", **{**options, **leg})
        first, second = done(run), done(run)
        found.append([first.loss, first.grad_norm, first.valid_tokens, second.loss, *run.evaluate()])
    return found


def test_every_number_of_ranks_divides_by_all_targets(tmp_path: Path, one_rank: None) -> None:
    """Data, pipeline and tensor parallelism, and accumulation, against one rank."""
    options = options_of(tmp_path, balance_loss=0.0)
    ranks = run_ranks(figures, 2, str(tmp_path / "many"), options, LEGS)
    assert ranks[0] == ranks[1]
    alone = figures(0, 1, str(tmp_path / "one"), options, ({"batch": 4}, {"batch": 4, "mask_documents": True}))
    for leg, found in zip(LEGS, ranks[0], strict=True):
        assert found == pytest.approx(alone[leg.get("mask_documents", False)], rel=2e-5), leg


def test_a_token_that_begins_in_the_prompt_is_a_target(tmp_path: Path) -> None:
    """ "ASSISTANT: " ends in a space, which the first token of the answer, " fine", begins with; as with a template that marks it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    targets: list[list[str]] = []
    for marks in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        folder = tmp_path / str(len(targets))
        write_chat_tokenizer(
            folder,
            "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: "
            + "{{ m.content }}<|im_end|>".join(marks)
            + "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
        )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(["ASSISTANT: USER: Hello thanks fine"] * 20, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "fine thanks"}]
        ids, mask = chat.ChatTemplate(FileTokenizer(folder)).encode_with_mask(messages)
        targets.append([tokenizer.decode([token], skip_special_tokens=False) for token, target in zip(ids, mask, strict=True) if target])
    assert targets == [[" fine", " thanks", "<|im_end|>"]] * 2
