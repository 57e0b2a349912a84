"""One text for everyone: what a scorer and a screen see is what the library `tokenizers` decodes from tokenizer.json,
and prompts have the ids that transformers gives from this file.

The folders have the decoders, the classes and the configurations of the families that recipes ship for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ppoctl.core.batch.requests import SamplingParams
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.data.response_text import ResponseText
from ppoctl.data.template import PromptTemplate
from ppoctl.data.token_text import TokenText
from ppoctl.data.tokenizer import decode, light_tokenizer, load_tokenizer
from ppoctl.data.tokenizer_check import require_ids_as_stored, require_text_as_stored

TEXTS = (
    "What is 12 + 3?\nIt's 15 .\n\n  #### 15",
    " don't , we 've no \u00e9 \u4f60 \U0001f600\t!",
    "a  b\r\n\n\n    c , d",
    "<think>2 + 2</think> <answer> 4 </answer>",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ADDED = {"<|end|>": True, "<|pad|>": True, "<answer>": True, "</answer>": True, "<think>": False, "</think>": False}
"""Added token -> whether it is special."""
PLAIN = SamplingParams(1.0, 64)


def added(core: Tokenizer, tokens: Mapping[str, bool] = ADDED, **flags: bool) -> Tokenizer:
    for text, special in tokens.items():
        core.add_tokens([AddedToken(text, special=special, normalized=False, **flags)])
    return core


def byte_level(split: str | None = None, **flags: bool) -> Tokenizer:
    """Return a tokenizer like those of Qwen, Llama 3, DeepSeek and Moonlight."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("\u0120", "a"),
        ("\u0120", "."),
        ("i", "t"),
        ("\u0120", "it"),
        ("'", "s"),
        ("1", "5"),
        ("\u010a", "\u010a"),
    ]
    vocabulary = {token: n for n, token in enumerate([*letters, *map("".join, merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.normalizer = normalizers.NFC()
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), "isolated")
        splitter = pre_tokenizers.Sequence([cut, splitter])  # type: ignore[assignment]
    core.pre_tokenizer, core.decoder = splitter, decoders.ByteLevel()
    return added(core, **flags)


def sentencepiece(*, strips: bool, legacy: bool) -> Tokenizer:
    """Return a tokenizer like those of Llama 2, Mistral (with `strips`) and Gemma."""
    base = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    letters = ["\u2581", *map(chr, range(33, 127))]
    merges = [("\u2581", "a"), ("\u2581", "."), ("i", "t"), ("\u2581", "it"), ("'", "s"), ("\u2581", "\u2581")]
    vocabulary = {token: n for n, token in enumerate([*base, *letters, *map("".join, merges)])}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    blank = normalizers.Replace(" ", "\u2581")
    if legacy:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank])
    elif strips:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        core.normalizer = blank
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return added(core, {"<unk>": True, "<s>": True, "</s>": True, **ADDED})


def metaspace() -> Tokenizer:
    """Return a Unigram tokenizer, as SentencePiece's of Albert and T5."""
    letters = ["\u2581", *map(chr, range(33, 127)), "\u2581a", "\u2581it", "'s"]
    core = Tokenizer(models.Unigram([("<unk>", 0.0), *((token, -float(len(token) < 2)) for token in letters)], 0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return added(core, {"<unk>": True, **ADDED})


def word_piece() -> Tokenizer:
    letters = [*map(chr, range(33, 127)), *(f"##{chr(n)}" for n in range(33, 127))]
    core = Tokenizer(models.WordPiece({token: n for n, token in enumerate(["[UNK]", *letters])}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece("##", cleanup=False)
    return added(core, {"[UNK]": True, **ADDED})


@dataclass(frozen=True)
class Case:
    core: Callable[[], Tokenizer]
    family: str = "qwen2"
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of tokenizer_config.json."""
    names: tuple[str, ...] = ()
    """Tokens that only the configuration names."""

    def write(self, folder: Path) -> Tokenizer:
        core = self.core()
        core.save(str(folder / "tokenizer.json"))
        named = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps({**named, **self.config}))
        (folder / "config.json").write_text(json.dumps({"model_type": self.family, "eos_token_id": 0}))
        return core


def listed(core: Tokenizer, *more: str) -> dict[str, Any]:
    """Return an `added_tokens_decoder` with all added tokens and `more`."""
    tokens = [*core.get_added_tokens_decoder().items()]
    tokens += enumerate((AddedToken(text, special=True, normalized=False) for text in more), core.get_vocab_size())
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(id): {name: getattr(token, name) for name in names} for id, token in tokens}


LLAMA_2 = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "bos_token": "<s>"}
CASES = {
    "Qwen 2, 2.5, 3": Case(lambda: byte_level(GPT2), config={"tokenizer_class": "Qwen2Tokenizer"}),
    "Qwen 2 with a complete list": Case(
        lambda: byte_level(GPT2),
        config={"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": listed(byte_level(GPT2))},
    ),
    "Llama 3": Case(lambda: byte_level(GPT2), "llama", {"clean_up_tokenization_spaces": True}),
    "DeepSeek": Case(byte_level, "deepseek_v3", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "byte level named LlamaTokenizer": Case(byte_level, "llama", {"tokenizer_class": "LlamaTokenizer"}),
    "Moonlight": Case(lambda: byte_level(GPT2), "deepseek_v3", {"tokenizer_class": "TikTokenTokenizer"}),
    "Llama 2": Case(lambda: sentencepiece(strips=True, legacy=True), "llama", LLAMA_2),
    "Llama 2, clean-up": Case(
        lambda: sentencepiece(strips=True, legacy=True), "llama", {**LLAMA_2, "clean_up_tokenization_spaces": True}
    ),
    "Mistral": Case(lambda: sentencepiece(strips=True, legacy=False), "mistral", LLAMA_2),
    "Gemma": Case(lambda: sentencepiece(strips=False, legacy=False), "gemma", {"tokenizer_class": "GemmaTokenizer"}),
    "SentencePiece named Qwen2Tokenizer": Case(
        lambda: sentencepiece(strips=True, legacy=True), config={"tokenizer_class": "Qwen2Tokenizer"}
    ),
    "Unigram": Case(metaspace, "t5", {"tokenizer_class": "T5Tokenizer"}),
    "WordPiece, clean-up": Case(word_piece, "bert", {"clean_up_tokenization_spaces": True}),
    "blanks around added tokens": Case(lambda: byte_level(lstrip=True, rstrip=True)),
    "tokens of the configuration": Case(
        byte_level,
        config={"added_tokens_decoder": listed(byte_level(), "<|turn|>", "<tool>")},
        names=("<|turn|>", "<tool>"),
    ),
    "extra special tokens": Case(byte_level, config={"extra_special_tokens": ["<|turn|>"]}, names=("<|turn|>",)),
    "additional special tokens": Case(
        byte_level, config={"additional_special_tokens": ["<|turn|>", "<answer>"]}, names=("<|turn|>",)
    ),
    "a new padding token": Case(byte_level, config={"pad_token": "<|none|>", "image_token": "<i>"}, names=("<i>",)),
    "end token that is not special": Case(
        lambda: added(byte_level(), {"<end>": False}), config={"eos_token": "<end>"}
    ),
}
for_each_folder = pytest.mark.parametrize("name", CASES)


@for_each_folder
def test_scorers_and_screens_see_what_tokenizer_json_decodes(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    stored = case.write(tmp_path)
    scorer, screen = ResponseText(str(tmp_path), []), TokenText(str(tmp_path))
    prompts, theirs = load_tokenizer(str(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = PromptTemplate(prompts)
    every = [id for id in range(stored.get_vocab_size()) if id not in scorer.silent]
    for ids in (*(stored.encode(text, add_special_tokens=False).ids for text in TEXTS), every, every[::-3]):
        ids = [id for id in ids if id not in scorer.silent]
        text = stored.decode(ids, skip_special_tokens=False)
        assert scorer.text(ids, PLAIN) == text
        assert screen.text(ids) == text
        assert decode(prompts, ids) == text
        dropped = SamplingParams(1.0, 64, special_tokens="drop")
        assert scorer.text(ids, dropped) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=True)
    require_text_as_stored(tmp_path, lambda ids: scorer.text(ids, PLAIN), scorer.silent)
    require_ids_as_stored(tmp_path, lambda text: template.token_ids([text])[0][len(template.opening) :])


@for_each_folder
def test_quick_tokenizer_has_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    stored = case.write(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    quick = light_tokenizer(tmp_path)
    is_complete = not case.names and name not in ("a new padding token", "end token that is not special")
    assert (quick is not None) == is_complete
    used = quick or load_tokenizer(str(tmp_path))
    for special in (False, True):
        for text in (*TEXTS, *case.names):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert used(text, add_special_tokens=special)["input_ids"] == ids
    if quick is None:
        return
    assert quick.backend_tokenizer.get_vocab() == theirs.get_vocab()
    own = (quick.bos_token_id, quick.eos_token_id, quick.pad_token_id)
    assert own == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert [quick(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == [
        stored.encode(text, add_special_tokens=False).ids for text in TEXTS
    ]


def test_tokens_of_the_configuration_have_their_text(tmp_path: Path) -> None:
    stored = CASES["tokens of the configuration"].write(tmp_path)
    scorer, screen = ResponseText(str(tmp_path), []), TokenText(str(tmp_path))
    size = stored.get_vocab_size()
    assert scorer.text([size, size + 1], PLAIN) == "<|turn|><tool>" == screen.text([size, size + 1])
    assert screen.unknown([0, size, size + 1, size + 2]) == [False, False, False, True]


def test_special_tokens_are_kept_except_end_and_padding(tmp_path: Path) -> None:
    stored = CASES["Qwen 2, 2.5, 3"].write(tmp_path)
    end, pad = (stored.token_to_id(text) for text in ("<|end|>", "<|pad|>"))
    other_end = stored.token_to_id("a")
    ids = [pad, *stored.encode("<think>2</think><answer>4</answer>").ids, end, pad, other_end]
    scorer = ResponseText(str(tmp_path), [other_end])
    assert scorer.text(ids, PLAIN) == "<think>2</think><answer>4</answer>"
    assert scorer.text(ids, SamplingParams(1.0, 9, special_tokens="drop")) == "<think>2</think>4"
    stopped = SamplingParams(1.0, 9, stop_strings=("</answer>",))
    assert scorer.text(ids, stopped) == "<think>2</think><answer>4"
    assert scorer.text([*ids[:-1], stored.token_to_id("b")], SamplingParams(1.0, 9, stop_token_ids=(5,)))[-1] == "b"


def test_stop_string_at_the_start_is_found_where_the_decoder_removes_a_blank(tmp_path: Path) -> None:
    stored = CASES["Llama 2"].write(tmp_path)
    ids = stored.encode("it a .", add_special_tokens=False).ids
    scorer = ResponseText(str(tmp_path), [])
    assert scorer.text(ids, PLAIN) == "it a ."
    for stops, text in {(" it",): "", (" a",): "it", ("it",): "", ("a .",): "it "}.items():
        assert scorer.text(ids, SamplingParams(1.0, 9, stop_strings=stops)) == text


def test_another_reader_is_found(tmp_path: Path) -> None:
    """`AutoTokenizer` builds another decoder for this folder, which a check without its own judge would not see."""
    CASES["byte level named LlamaTokenizer"].write(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(EnvironmentProblemError, match="read in two ways: rewards see"):
        require_text_as_stored(tmp_path, other.decode)
    with pytest.raises(EnvironmentProblemError, match="read in two ways: prompts get the ids"):
        require_ids_as_stored(tmp_path, lambda text: other(text, add_special_tokens=False)["input_ids"])
    bert = tmp_path / "bert"
    bert.mkdir()
    CASES["WordPiece, clean-up"].write(bert)
    with pytest.raises(EnvironmentProblemError, match="read in two ways"):
        require_text_as_stored(bert, PreTrainedTokenizerFast.from_pretrained(bert).decode)


def test_configuration_that_states_another_id_is_an_error(tmp_path: Path) -> None:
    case = CASES["tokens of the configuration"]
    size = case.core().get_vocab_size()
    wrong = {str(size + 5): {**case.config["added_tokens_decoder"][str(size)]}}
    Case(case.core, config={"added_tokens_decoder": wrong}).write(tmp_path)
    with pytest.raises(EnvironmentProblemError, match=rf"`<\|turn\|>` the id {size + 5}, but .* the id {size}"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [("added_tokens_decoder", {"x": 1}), ("added_tokens_decoder", [1]), ("extra_special_tokens", [{}])],
)
def test_malformed_configuration_is_named(tmp_path: Path, name: str, content: Any) -> None:
    Case(byte_level, config={name: content}).write(tmp_path)
    with pytest.raises(EnvironmentProblemError, match=r"tokenizer_config.json` does not have the form"):
        light_tokenizer(tmp_path)


def test_model_with_sentencepiece_only_has_one_text(tmp_path: Path) -> None:
    import sentencepiece

    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(f"It 's {n} and {n + 1} .\nWhat is {n} ?" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines), model_prefix=str(tmp_path / "tokenizer"), vocab_size=330, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "clean_up_tokenization_spaces": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    judge = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    [ids] = PromptTemplate(load_tokenizer(str(tmp_path))).token_ids(["It 's 15 and 16 ."])
    end = judge.eos_id()
    assert ids[-1] != end
    own = [id for id in ids if id != judge.bos_id()]
    assert own == judge.encode("It 's 15 and 16 .")
    assert ResponseText(str(tmp_path), [end]).text([*own, end], PLAIN) == judge.decode(own) == "It 's 15 and 16 ."
    assert TokenText(str(tmp_path)).text(own) == judge.decode(own)
    assert TokenText(str(tmp_path)).unknown([0, 329, 330]) == [False, False, True]


def test_ordinary_token_named_as_padding_is_text(tmp_path: Path) -> None:
    Case(byte_level, config={"pad_token": "!"}).write(tmp_path)
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = stored.encode("25! 4!", add_special_tokens=False).ids
    assert ResponseText(str(tmp_path), [0]).text([*ids, 0], PLAIN) == "25! 4!"


@pytest.mark.parametrize("vocabulary", ["absent", "empty"])
def test_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path, vocabulary: str) -> None:
    Case(byte_level, config={"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<pad>"}).write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    file.unlink()
    if vocabulary == "empty":
        file.write_text(json.dumps({**stored, "model": {**stored["model"], "vocab": {}, "merges": []}}))
    with pytest.raises(EnvironmentProblemError, match="no vocabulary"):
        load_tokenizer(str(tmp_path))


def test_dropout_of_the_tokenizer_is_off(tmp_path: Path) -> None:
    Case(byte_level).write(tmp_path)
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    text = "What is 12 + 3? The answer is 15."
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    file.write_text(json.dumps({**stored, "model": {**stored["model"], "dropout": 0.9}}))
    for tokenizer in (load_tokenizer(str(tmp_path)), light_tokenizer(tmp_path)):
        assert tokenizer is not None
        assert [tokenizer(text, add_special_tokens=False)["input_ids"] for _ in range(5)] == [ids] * 5
