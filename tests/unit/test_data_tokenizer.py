"""Tokenizers: saving, loading, Hugging Face's files, training; errors name the file."""

import json
import shutil

import pytest
import transformers

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_bpe
from colonnade.errors import ConfigError, DataError, RequestError
from tests import tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat_tokenizer() -> Tokenizer:
    core = train_bpe([tokens.TEXT], 320, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return Tokenizer(core, 0, (2, 0), CHATML)


def write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


# -- save and load ----------------------------------------------------------------------------------------------------


def test_saving_and_loading_round_trips(chat_tokenizer, tmp_path):
    chat_tokenizer.save(tmp_path)
    loaded = Tokenizer.from_file(tmp_path)
    assert (loaded.bos_id, loaded.eos_ids, loaded.chat_template) == (0, (2, 0), CHATML)
    assert loaded.fingerprint == chat_tokenizer.fingerprint
    assert loaded.encode(tokens.TEXT) == chat_tokenizer.encode(tokens.TEXT)
    assert Tokenizer.from_file(tmp_path / "tokenizer.json").eos_ids == (2, 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_transformers_reads_what_we_save(chat_tokenizer, tmp_path):
    chat_tokenizer.save(tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "the fox <|im_end|> naïve 🙂"
    assert reference.encode(text) == chat_tokenizer.encode(text)
    assert reference.decode(chat_tokenizer.encode(text)) == chat_tokenizer.decode(
        chat_tokenizer.encode(text), skip_special=False
    )
    assert (reference.bos_token_id, reference.eos_token_id) == (0, 2)
    messages = [{"role": "user", "content": "hello"}]
    assert reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat_tokenizer.chat(
        messages
    )
    again = tmp_path / "again"
    reference.save_pretrained(again)
    back = Tokenizer.from_file(again)
    assert (back.bos_id, back.eos_ids[0], back.chat_template) == (0, 2, CHATML)


def test_all_hugging_face_files_are_read(chat_tokenizer, tmp_path):
    chat_tokenizer.save(tmp_path)
    write(
        tmp_path,
        tokenizer_config__json={"bos_token": {"content": "<|endoftext|>"}, "chat_template": "old"},
        special_tokens_map__json={"eos_token": "<|im_end|>"},
        generation_config__json={"eos_token_id": [0, 2]},
        chat_template__jinja="new",
    )
    loaded = Tokenizer.from_file(tmp_path)
    assert loaded.bos_id == 0
    assert loaded.eos_ids == (2, 0)  # the tokenizer's own end token first, then the others
    assert loaded.chat_template == "new"


def test_generation_config_alone_gives_the_end_tokens(chat_tokenizer, tmp_path):
    chat_tokenizer.save(tmp_path)
    write(tmp_path, tokenizer_config__json={}, generation_config__json={"bos_token_id": 1, "eos_token_id": 2})
    loaded = Tokenizer.from_file(tmp_path)
    assert (loaded.bos_id, loaded.eos_ids) == (1, (2,))


def test_the_default_one_of_several_templates_is_used(chat_tokenizer, tmp_path):
    chat_tokenizer.save(tmp_path)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    assert Tokenizer.from_file(tmp_path).chat_template == "yes"


def test_padding_and_truncation_in_the_file_are_ignored(chat_tokenizer, tmp_path):
    core = train_bpe([tokens.TEXT], 300)
    core.enable_truncation(4)
    core.enable_padding(length=8)
    core.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(tmp_path)
    assert len(loaded.encode(tokens.TEXT)) > 8
    assert len(loaded.encode("a")) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json does not exist"),
        ({"tokenizer__json": "{"}, "tokenizer.json is not a tokenizer.json"),
        ({"tokenizer__json": {"version": "1.0"}}, "tokenizer.json is not a tokenizer.json"),
        ({"tokenizer_config__json": "nothing"}, "tokenizer_config.json is not JSON"),
        ({"generation_config__json": [1]}, "generation_config.json contains list"),
        ({"generation_config__json": {"eos_token_id": 9999}}, "9999 is outside the vocabulary of 300"),
    ],
)
def test_invalid_files_are_named(files, message, tmp_path):
    if files and "tokenizer__json" not in files:
        tokens.byte_level().save(tmp_path)
    write(tmp_path, **files)
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.from_file(tmp_path)
    assert "\n" not in str(caught.value)


# -- encode and decode ------------------------------------------------------------------------------------------------


def test_control_tokens_are_ids_in_prompts_and_text_in_documents():
    tokenizer = tokens.byte_level()
    text = "an <|endoftext|> here"
    assert 0 in tokenizer.encode(text)
    literal = tokenizer.encode_documents([text, text])
    assert literal[0] == literal[1]
    assert 0 not in literal[0]
    assert tokenizer.decode(literal[0]) == text
    assert 0 in tokenizer.encode(text), "the literal copy must not change the tokenizer itself"


def test_special_adds_the_tokenizers_begin_token():
    core = train_bpe([tokens.TEXT], 300)
    from tokenizers.processors import TemplateProcessing

    core.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = Tokenizer(core, 0, (0,))
    assert tokenizer.encode("fox") == [0, *tokenizer.encode("fox", special=False)]
    assert tokenizer.encode_documents(["fox"]) == [tokenizer.encode("fox", special=False)]


def test_a_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match="character 2 is a lone surrogate"):
        tokens.byte_level().encode("ab\ud83d")


def test_gpt2_tokenizer_matches_openais_ids():
    tokenizer = tokens.gpt2()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (50257, 50256, (50256,))
    assert tokenizer.encode("Hello world") == [15496, 995]  # as OpenAI's encoder returns
    assert tokenizer.encode("<|endoftext|>") == [50256]
    assert tokenizer.decode(tokenizer.encode(tokens.TEXT)) == tokens.TEXT


def test_vocab_and_merges_files_load(tmp_path):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}), encoding="utf-8")
    merges.write_text("#version: 0.2\na b\n", encoding="utf-8")
    assert Tokenizer.from_bpe_files(vocab, merges).encode("ab<|endoftext|>") == [2, 3]
    assert Tokenizer.from_file(tmp_path).encode("aab") == [0, 2]
    merges.write_text("a c\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"merges\.txt does not fit"):
        Tokenizer.from_bpe_files(vocab, merges)
    shutil.copy(merges, vocab)
    with pytest.raises(DataError, match=r"vocab\.json is not JSON"):
        Tokenizer.from_bpe_files(vocab, merges)
    with pytest.raises(DataError, match=r"none\.txt does not exist"):
        Tokenizer.from_bpe_files(vocab, tmp_path / "none.txt")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [257, 258, 301])
def test_any_vocabulary_size_encodes_any_text(vocab_size):
    tokenizer = Tokenizer.train([tokens.TEXT], vocab_size)
    assert tokenizer.vocab_size == vocab_size
    unseen = "Ω≈ç√ \x00\x7f\r\n\t 𝔘"
    assert tokenizer.decode(tokenizer.encode(unseen)) == unseen


def test_training_does_not_depend_on_the_order_of_texts():
    texts = [f"{word} {tokens.TEXT[i:]}" for i, word in enumerate(tokens.TEXT.split())]
    fingerprints = {Tokenizer.train(order, 400).fingerprint for order in (texts, texts, texts[::-1])}
    assert len(fingerprints) == 1


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="256 is too small, use 257 or more"):
        Tokenizer.train([tokens.TEXT], 256)


@pytest.mark.slow
def test_dialogpt_has_turns_that_end_with_eos(tmp_path):
    """Its folder has GPT-2's two files and no template; transformers' example concatenates turn + EOS."""
    gpt2 = json.loads(tokens.gpt2().json)
    merges = gpt2["model"]["merges"]
    write(
        tmp_path,
        vocab__json=gpt2["model"]["vocab"] | {"<|endoftext|>": 50256},
        merges__txt="\n".join(["#version: 0.2", *(m if isinstance(m, str) else " ".join(m) for m in merges)]),
        config__json={
            "model_type": "gpt2", "eos_token_id": 50256, "n_positions": 1024,
            "task_specific_params": {"conversational": {"max_length": 1000}},
        },
    )  # fmt: skip
    ours = Tokenizer.from_model(tmp_path)
    assert ours is not None
    assert ours.eos_ids == (50256,)
    theirs = transformers.GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    turns = ["Does money buy happiness?", "Depends how much money you spend on it .", "What is <|endoftext|>?"]
    roles = ("user", "assistant", "user")
    found = ours.encode_chat([{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)])
    expected = [i for turn in turns[:2] for i in theirs.encode(turn + theirs.eos_token)]
    assert found[: len(expected)] == expected
    assert found[-1] == 50256
    assert found.count(50256) == 3  # spelled in a message, it is text
    again = tmp_path / "again"
    again.mkdir()
    ours.save(again)
    assert Tokenizer.from_file(again).encode_chat([{"role": "user", "content": turns[0]}]) == expected[:6]
