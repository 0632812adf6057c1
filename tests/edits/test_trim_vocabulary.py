"""`trim_vocabulary`: by plain transformers, texts of tokens that stay are cut as before and their logits stay.

Which texts those are is known from the base's tokenizer alone: all of whose tokens stay.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import surgeon
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.checkpoint.tokenizer_files import TokenizerJson
from surgeon.edits.vocabulary.growing import Old, check_ids
from surgeon.edits.vocabulary.trimmed import Closure, from_bits, to_bits, trimmed_files
from surgeon.errors import BadInput
from surgeon.models.tokenizer import open_tokenizer
from surgeon.runtime.graft import cache_in
from tests import mtp, tiny, vocabularies
from tests.caches import CACHE
from tests.checkpoints import edit_config, edit_tensor, weights, write_plan
from tests.decoders import tiny_decoder
from tests.vocabularies import ENGLISH, FRENCH, SPECIAL, write_text

ROWS = 400
TRIM = {"op": "trim_vocabulary", "text": "en.jsonl", "measure": "both.jsonl"}
BOTH = ENGLISH + FRENCH
# A token of French words, which nothing but generation_config.json names.
SUPPRESSED = 370
MADE: dict[str, Callable[[Path], Path]] = {
    "byte-level": lambda folder: vocabularies.byte_level(folder, size=380, texts=BOTH * 3, above=("<|end|>",)),
    "whole words first": lambda folder: vocabularies.byte_level(folder, size=380, texts=BOTH * 3, ignore_merges=True),
    "SentencePiece": lambda folder: vocabularies.sentencepiece_like(folder, size=390, texts=BOTH * 3),
    "WordPiece": lambda folder: vocabularies.word_piece(folder, size=140, texts=BOTH * 3),
    "Unigram": vocabularies.unigram,
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that keeps the tokens of English text, with its texts beside it."""
    folder = tmp_path_factory.mktemp("plan")
    write_text(folder / "en.jsonl", ENGLISH[:3])
    write_text(folder / "both.jsonl", BOTH)
    write_plan(folder / "plan.yaml", [TRIM])
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def trimmed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A base with settings that name ids, and its trim."""
    folder = tmp_path_factory.mktemp("trimmed")
    base = MADE["byte-level"](tiny.checkpoint(folder / "base", "llama", vocab_size=ROWS, num_hidden_layers=2))
    edit_config(base, eos_token_id=[2, 380], image_token_id=380, pad_token_id=0, head_index=380)
    answers = {"eos_token_id": [2, 380], "pad_token_id": -1, "suppress_tokens": [SUPPRESSED]}
    (base / "generation_config.json").write_text(json.dumps(answers))
    (base / "tokenizer.model").write_bytes(b"old ids")
    (base / "vocab.json").write_text("{}")
    surgeon.apply(plan, base, folder / "out", device="cpu")
    yield base, folder / "out"


def sentences(count: int = 400) -> list[str]:
    """Texts of the words of both languages, and of others, in any order."""
    draws = random.Random(0)
    words = sorted(
        {word for text in BOTH for word in text.split()} | {"déjà-vu", "zebra", "日本", "a", "the\nsea", "</s>"}
    )
    return [" ".join(draws.choices(words, k=draws.randint(1, 5))) for _ in range(count)]


@pytest.mark.parametrize("kind", MADE)
def test_texts_are_cut_as_before_exactly_where_all_tokens_stay(kind: str, plan: Path, tmp_path: Path) -> None:
    base = MADE[kind](tiny.checkpoint(tmp_path / "base", "llama", vocab_size=ROWS, num_hidden_layers=1))
    manifest = surgeon.apply(plan, base, tmp_path / "out", device="cpu").manifest
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "out"))
    kept = from_bits(manifest.facts["0"].kept)
    texts = [*BOTH, *sentences()]
    alike = 0
    for text in texts:
        old, new = (tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (before, after))
        assert ({*old} <= {*kept}) == (old == [kept[number] for number in new]), text
        alike += {*old} <= {*kept}
    assert 20 < alike < len(texts) - 20
    english, both = manifest.measured
    assert english.documents == english.unchanged == 3
    cut = [before(text, add_special_tokens=False)["input_ids"] for text in BOTH]
    assert (both.documents, both.unchanged) == (len(BOTH), sum({*ids} <= {*kept} for ids in cut))
    assert both.unchanged < len(BOTH)
    # Special tokens, bytes where there are some, and the template's words are there still.
    assert [after.convert_tokens_to_ids(token) for token in SPECIAL] == [kept.index(n) for n in range(4)]
    added = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
    assert added and all(after.convert_tokens_to_ids(entry["content"]) == entry["id"] for entry in added)
    assert before.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False).endswith("</s>")
    if "byte" in kind or kind in ("whole words first", "SentencePiece"):
        assert after.decode(after("日本 déjà")["input_ids"], skip_special_tokens=True).strip() == "日本 déjà"


LOGITS = {"llama": CAUSAL, "qwen3": CAUSAL, "gemma3": IMAGE_TEXT, "qwen3_moe": CAUSAL, "gpt_oss": CAUSAL, "phi": CAUSAL}


@pytest.mark.parametrize("model_type", LOGITS)
def test_logits_of_tokens_that_stay_are_those_of_the_base(model_type: str, tmp_path: Path) -> None:
    """Of six types, with tied embeddings, a tower for pictures, experts and a head with a bias among them."""
    base = tiny_decoder(tmp_path / "base", model_type, LOGITS[model_type], dtype="bfloat16")
    vocabularies.word_piece(base, size=140)
    write_plan(
        tmp_path / "plan.yaml", [{"op": "trim_vocabulary", "tokens": ["the sea", "cat"], "pad_to_multiple_of": 4}]
    )
    applied = surgeon.apply(tmp_path / "plan.yaml", base, tmp_path / "out", device="cpu")
    kept = from_bits(applied.manifest.facts["0"].kept)
    assert 8 <= len(kept) <= 20 and kept[-1] > 24
    old = torch.tensor(kept)
    ids = torch.randint(len(kept), (2, 12), generator=torch.Generator().manual_seed(0))
    for dtype in ("float32", "bfloat16"):
        before = both_ways(base, old[ids], dtype, LOGITS[model_type])
        after = both_ways(tmp_path / "out", ids, dtype, LOGITS[model_type])
        assert torch.equal(before[..., old], after)


def both_ways(folder: Path, ids: torch.Tensor, dtype: str, auto: str) -> torch.Tensor:
    """Logits of whole sequences, and with a cache token by token, by plain transformers."""
    model = getattr(transformers, auto).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    for value in model.parameters():
        # On the same footing: what is mapped from a file may lie otherwise than memory does.
        value.data = value.data.clone()
    with torch.inference_mode():
        found, cache = [model(input_ids=ids).logits], None
        for step in ids.split(1, dim=1):
            made = model(input_ids=step, **{CACHE: cache}, use_cache=True)
            found, cache = [*found, made.logits], cache_in(made)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("streamed", [False, True])
def test_verify_compares_what_stays(streamed: bool, trimmed: tuple[Path, Path]) -> None:
    verified = surgeon.verify(
        *trimmed, device="cpu", windows=1, window=16, streamed=streamed, dtypes=("float32", "bfloat16")
    )
    assert verified.holds and verified.identical
    assert {c.mode for c in verified.comparisons} == {"prefill", "cached decode"}
    assert verified.tokens.endswith("without the tokens that went")


def test_every_id_is_renumbered_and_nothing_else(trimmed: tuple[Path, Path]) -> None:
    base, out = trimmed
    facts = surgeon.Manifest.model_validate_json((out / "surgery.json").read_text(), strict=False).facts["0"]
    kept = from_bits(facts.kept)
    new = kept.index(380)
    config, was = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
    assert config == was | {"vocab_size": len(kept), "eos_token_id": [2, new], "image_token_id": new}
    answers = json.loads((out / "generation_config.json").read_text())
    assert answers == {"eos_token_id": [2, new], "pad_token_id": -1, "suppress_tokens": [kept.index(SUPPRESSED)]}
    left = [name for name, how in facts.side_files.items() if how.sha256 is None]
    assert sorted(left) == ["tokenizer.model", "vocab.json"] and not any((out / name).exists() for name in left)
    one, other = weights(base), weights(out)
    assert all(torch.equal(other[n], one[n][list(kept)]) for n in ("lm_head.weight", "model.embed_tokens.weight"))


def test_verify_finds_an_edit(trimmed: tuple[Path, Path], tmp_path: Path) -> None:
    base, out = trimmed
    for name, edit in {
        "tokenizer": lambda copy: _swap_two_ids(copy / "tokenizer.json"),
        "base tensors": lambda copy: edit_tensor(copy, "lm_head.weight", lambda value: value.roll(1, 0)),
        "config": lambda copy: edit_config(copy, image_token_id=380),
    }.items():
        copy = shutil.copytree(out, tmp_path / name)
        edit(copy)
        wrong = [check.name for check in surgeon.verify(base, copy, logits=False).checks if not check.holds]
        assert name in wrong, (name, wrong)


def _swap_two_ids(file: Path) -> None:
    data = json.loads(file.read_text())
    names = list(data["model"]["vocab"])[-2:]
    one, other = (data["model"]["vocab"][name] for name in names)
    data["model"]["vocab"] |= dict(zip(names, (other, one), strict=True))
    file.write_text(json.dumps(data))


def test_a_delta_brings_the_files_and_no_rows(trimmed: tuple[Path, Path], tmp_path: Path) -> None:
    base, out = trimmed
    made = surgeon.make_delta(out, tmp_path / "delta")
    assert not made.tensors
    surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again")
    for file in out.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    with pytest.raises(BadInput, match=r"surgery 1 \(trim_vocabulary\) gave it another value.*take the base"):
        surgeon.revert(out, tmp_path / "back")


def test_the_worst_piece_of_a_unigram_stays() -> None:
    """By its score a Unigram counts unknown characters: without it a text of tokens that stay is cut otherwise."""
    pieces = {"<unk>": 0.0, "pa": -30.0, "qx": -30.0, "paq": -1.0, "rare": -100.0}
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces.items()], unk_id=0))
    content = made.to_str().encode()
    always = Closure(TokenizerJson.parse(content)).always()
    assert always == {0, 4}
    cut = {}
    for kept in ((0, 1, 2, 3, 4), (0, 1, 2, 3)):
        file = trimmed_files({"tokenizer.json": content}, kept).get("tokenizer.json", content)
        assert file is not None
        cut[kept] = tokenizers.Tokenizer.from_str(file.decode()).encode("paqx").tokens
    assert [*cut.values()] == [["pa", "qx"], ["paq", "x"]]


def test_unknown_tokens_stay() -> None:
    for model in (
        tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"),
        tokenizers.models.BPE({"a": 0, "[UNK]": 1}, [], unk_token="[UNK]"),
    ):
        assert Closure(TokenizerJson.parse(tokenizers.Tokenizer(model).to_str().encode())).always() == {1}


def test_ids_that_transformers_gives_otherwise_are_refused(trimmed: tuple[Path, Path]) -> None:
    tokenizer, _ = open_tokenizer(trimmed[0])
    assert tokenizer is not None
    old = Old(TokenizerJson.parse((trimmed[0] / "tokenizer.json").read_bytes()), "base", ROWS)
    old.ask(tokenizer)
    wanted = {content: number for content, number in old.taken.items() if number < 381}
    check_ids(old, wanted, tokenizer.vocabulary())
    with pytest.raises(BadInput, match=r"would have the id \d+ in place of \d+: transformers makes this tokenizer"):
        check_ids(old, {content: n - (n > 4) for content, n in wanted.items() if n != 4}, tokenizer.vocabulary())


def test_bits_say_which_ids_stay() -> None:
    for kept, rows in (((0,), 1), ((3, 4, 11), 12), ((0, 7, 8, 300), 301), (tuple(range(17)), 40)):
        assert from_bits(to_bits(kept, rows)) == kept
    assert to_bits((0, 5), 9) == "021"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all stays": ({"scripts": ["Latin"], "pad_to_multiple_of": 400}, "all 400 rows would stay"),
    "no such script": ({"scripts": ["Klingon-ish"]}, "there is no script Klingon-ish"),
    "no such text": ({"text": "none.jsonl"}, "none.jsonl: no such text"),
    "an empty text": ({"text": "empty.txt", "scripts": ["Latin"]}, "empty.txt: none of its 0 tokens occurs `least: 1`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_found(case: str, trimmed: tuple[Path, Path], tmp_path: Path) -> None:
    entry, message = REFUSED[case]
    (tmp_path / "empty.txt").touch()
    write_plan(tmp_path / "plan.yaml", [{"op": "trim_vocabulary", **entry}])
    with pytest.raises(BadInput, match=message):
        surgeon.preview(tmp_path / "plan.yaml", trimmed[0])


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings in every layer": ({"hidden_size_per_layer_input": 8}, "`hidden_size_per_layer_input`: its layers have"),
    "pictures by ids": ({"vocabulary_map": {"a": 1}}, "`vocabulary_map` maps tokens of pictures"),
    "ids among places": ({"forced_decoder_ids": [[1, 7]]}, "`forced_decoder_ids` mixes ids with other numbers"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_read_ids_elsewhere_are_refused(
    case: str, plan: Path, trimmed: tuple[Path, Path], tmp_path: Path
) -> None:
    changes, message = CONFIGS[case]
    base = shutil.copytree(trimmed[0], tmp_path / "base")
    edit_config(base, **changes)
    with pytest.raises(BadInput, match=message):
        surgeon.preview(plan, base)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mellum"])
def test_rows_of_layers_that_predict_further_tokens_go_too(model_type: str, tmp_path: Path) -> None:
    """Of layers above the stack and of `mtp.…`; transformers' own drafts are the base's, at the tokens that stay."""
    base = mtp.checkpoint(tmp_path / "base", model_type, vocab_size=160)
    names = ["mtp.embed_tokens.weight", "mtp.lm_head.weight"]
    if model_type == "deepseek_v3":
        names = [f"model.layers.{mtp.LAYERS}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    else:
        first = min(base.glob("*.safetensors"))
        save_file(load_file(first) | {name: torch.randn(160, 32) for name in names}, first, metadata={"format": "pt"})
        index = json.loads((base / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(names, first.name)
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    vocabularies.word_piece(base, size=140)
    trim = {"op": "trim_vocabulary", "tokens": ["the sea", "cat"], "pad_to_multiple_of": 4}
    out = surgeon.apply(write_plan(tmp_path / "plan.yaml", [trim]), base, tmp_path / "out", device="cpu")
    kept, before, after = torch.tensor(from_bits(out.manifest.facts["0"].kept)), weights(base), weights(out.path)
    assert all(torch.equal(after[name], before[name][kept]) for name in names)
    assert surgeon.verify(base, out.path, device="cpu", windows=1, window=16).holds
    ids = torch.randint(len(kept), (1, 12), generator=torch.Generator().manual_seed(0))
    drafted, expected = mtp.drafts(mtp.loaded(out.path), ids), mtp.drafts(mtp.loaded(base), kept[ids])
    assert all(torch.equal(one, other[..., kept]) for one, other in zip(drafted, expected, strict=True))
    # Where rows are added they are not known; and what nothing reads cannot be cut.
    for tokens in ({"op": "grow_vocabulary", "added": ["zebra"]}, {"op": "pad_to", "vocabulary": 256}):
        with pytest.raises(BadInput, match=rf"({'|'.join(names)}): .*has its own vocabulary rows"):
            surgeon.preview(write_plan(tmp_path / "plan.yaml", [tokens]), base)


def test_what_nothing_reads_and_has_rows_is_refused(tmp_path: Path) -> None:
    base = MADE["byte-level"](tiny.checkpoint(tmp_path / "base", "llama", vocab_size=ROWS, num_hidden_layers=1))
    held = weights(base) | {"value_head.weight": torch.zeros(ROWS, 2)}
    for file in (*base.glob("*.safetensors"), *base.glob("*.index.json")):
        file.unlink()
    save_file(held, base / "model.safetensors", metadata={"format": "pt"})
    write_plan(tmp_path / "plan.yaml", [{"op": "trim_vocabulary", "tokens": ["the"]}])
    with pytest.raises(BadInput, match=r"value_head\.weight: a tensor that nothing reads has its own vocabulary rows"):
        surgeon.preview(tmp_path / "plan.yaml", base)
