"""The scenes of a recording, computed from its tensors, equal what torch computed in the forward pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import colonnade
from colonnade.api import Model
from colonnade.checkpoint.peft import Adapter, write_peft
from colonnade.config import LORA_TARGETS, LatentConfig, LoraConfig, LoraTarget, ModelConfig, MoeConfig, Plan
from colonnade.errors import RequestError
from colonnade.look.app import LookApp
from colonnade.look.expression import parse
from colonnade.look.history import read_history
from colonnade.look.notebook import make_app
from colonnade.look.pages import make_page, pages_of
from colonnade.look.recorder import Recording, record
from colonnade.look.tensors import Names
from colonnade.look.tiles import decode_tile, encode_tile, reduce_tile
from colonnade.look.values import evaluate
from colonnade.model import Transformer
from colonnade.model.lora import is_adapter
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.trackers import ROUTING
from tests.models import CONFIGS, build
from tests.serve import tiny

TEXT = "The quick brown fox jumps over the lazy dog."
MOE = MoeConfig(experts=4, active=2, ffn_width=10)
NO_Q_RANK = LatentConfig(kv_rank=7, rope_width=2, v_width=5)
MODELS: dict[str, ModelConfig] = {
    name: config.replace(vocab_size=301) for name, config in CONFIGS.items() if not name.startswith("llama3")
} | {
    "experts": tiny.config(moe=MOE),
    "experts_gpt2": CONFIGS["gpt2"].replace(vocab_size=301, moe=MOE),
    "latent_experts": CONFIGS["latent"].replace(vocab_size=301, moe=MOE, latent=NO_Q_RANK),
    "capacity": tiny.config(moe=MOE.replace(capacity=1.0)),
}


def recording_of(config: ModelConfig) -> Recording:
    model = build(config, dtype=torch.float32)
    tokens = tiny.tokenizer().encode(TEXT)
    return record(model, tokens, ["x"] * len(tokens))


@pytest.fixture(scope="module", params=MODELS)
def recording(request: pytest.FixtureRequest) -> Recording:
    return recording_of(MODELS[request.param])


def faces(recording: Recording, page: str, layer: int = 1, head: int = 1, rank: int = 8) -> dict[str, np.ndarray]:
    scene = make_page(recording, page, layer, head, rank)
    json.dumps(scene)

    def tensor(ref: dict[str, Any]) -> np.ndarray:
        return Names(recording, ref["layer"], ref["head"]).get(ref["name"])

    for leaf in scene["leaves"].values():
        assert tensor(leaf["tensor"]).shape == (leaf["rows"], leaf["cols"])
    return evaluate(parse(scene["expr"]), scene["leaves"], scene["nodes"], tensor)


def close(mine: np.ndarray, theirs: np.ndarray) -> None:
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())


def test_head_equals_torch(recording: Recording) -> None:
    config = recording.config
    for layer, head in ((0, 0), (config.layers - 1, config.heads - 1)):
        names, found = Names(recording, layer, head), faces(recording, "head", layer, head)
        for face, reference in (("Q", "Q_recorded"), ("K_t", "K_t_recorded"), ("V", "V_recorded"), ("out", "out")):
            theirs = names.get(reference)
            if config.latent and face == "Q" and config.rope_scaling:  # its queries carry the factor of the scores
                continue
            close(found[face], theirs)
        close(found["attn"], names.attention(head).numpy())
        close(found["attn"] @ found["V"], names.get("head_out"))


def test_heads_sum_to_the_layers_output(recording: Recording) -> None:
    names = Names(recording, 0, 0)
    total = sum(Names(recording, 0, n).get("out") for n in range(recording.config.heads))
    close(total + names.get("bO"), names.get("attention_out"))


def test_decode_equals_the_last_row(recording: Recording) -> None:
    close(faces(recording, "decode")["out"], Names(recording, 1, 1).get("out")[-1:])


def test_layer_equals_torch(recording: Recording) -> None:
    names, found = Names(recording, 1, 0), faces(recording, "layer")
    close(found["mha"], names.get("attention_out"))
    if recording.config.experts_of(1) is None:
        close(found["ffn"], names.get("ffn_out"))


def test_experts_sum_to_the_layers_output(recording: Recording) -> None:
    moe = recording.config.moe
    if moe is None:
        with pytest.raises(RequestError, match="no experts"):
            make_page(recording, "experts", 1, 0, 8)
        assert "routing" not in pages_of(recording.config)
        return
    names = Names(recording, 1, 0)
    total, weights = np.zeros_like(names.get("ffn_out")), names.get("routing")
    for e in range(moe.experts):
        rows = Names(recording, 1, e).rows_of_expert().numpy()
        if len(rows):
            assert (weights[rows, e] > 0).all()
            total[rows] += weights[rows, e : e + 1] * faces(recording, "experts", 1, e)["y"]
            scene, chosen = make_page(recording, "experts", 1, e, 8), (weights[:, e] != 0).sum()
            assert scene["positions"] == {"x": rows.tolist()}
            assert f"{chosen} of {len(recording.tokens)} tokens chose this expert." in scene["note"]
            kept = f"{len(rows)} kept and {chosen - len(rows)} dropped by the expert's capacity."
            assert (kept in scene["note"]) == (moe.capacity is not None)
    close(total, names.get("ffn_out"))
    board, T = make_page(recording, "routing", 0, 0, 8), len(recording.tokens)
    assert [sum(layer["load"]) for layer in board["layers"]] == [2 * T] * recording.config.layers
    for layer in board["layers"]:
        weights = Names(recording, layer["layer"]).get("routing")
        assert layer["kept"] == (weights > 0).sum(0).tolist() and layer["dropped"] == (weights < 0).sum()
        assert (layer["dropped"] > 0) == (moe.capacity is not None)
        assert max(layer["kept"]) <= (2 * -(-T // 4) if moe.capacity else T)
        for column in ("load", "kept"):
            assert np.sum([window[column] for window in layer["windows"]], 0).tolist() == layer[column]
        assert 0 < layer["entropy"] <= np.log(4) and len(layer["windows"]) <= 32


def test_history_of_a_run(tmp_path: Path) -> None:
    """The routing page reads what training logs."""
    rows = [{"step": step, "1": {"load": [step, 2, 0, 0], "dropped": 1}} for step in range(1, 451)]
    (tmp_path / ROUTING).write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4')
    history = read_history(tmp_path / "step-450", tiny.config(moe=MOE))
    assert len(history["1"]["step"]) == 150 and history["1"]["load"][1] == [4, 2, 0, 0]
    assert history["1"]["entropy"][0] == pytest.approx(np.log(3) - 2 / 3 * np.log(2))
    assert read_history(tmp_path / "step-450", tiny.config(moe=MOE.replace(experts=5))) == {}
    assert read_history(tmp_path / "none" / "step-450", tiny.config(moe=MOE)) == {}
    board = make_page(recording_of(MODELS["experts"]), "routing", 0, 0, 8, history)
    assert board["layers"][0]["history"] is None and board["layers"][1]["history"]["dropped"] == [1] * 150


def adapted(folder: Path, name: str, targets: tuple[LoraTarget, ...]) -> colonnade.Model:
    """A model loaded by the name of its adapter, in PEFT's files."""
    base = Model(build(MODELS[name], dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(), name)
    colonnade.save(base, folder / "base")
    config = MODELS[name].replace(lora=LoraConfig(rank=3, alpha=9.0, targets=targets))
    shapes, generator = Transformer(config, device="meta").global_shapes(), torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) * 0.2 for n, s in shapes.items() if is_adapter(n)}
    write_peft(folder / "adapter", Adapter(config, tensors, str(folder / "base")))
    return colonnade.load(folder / "adapter", device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama_grouped_biased", LORA_TARGETS), ("qwen3_window_tied", ("k", "out")), ("llama", ("down",))],
)
def test_an_adapters_factors_and_base_are_the_adapted_model(
    tmp_path: Path, name: str, targets: tuple[LoraTarget, ...]
) -> None:
    with adapted(tmp_path, name, targets) as model:
        app = make_app(model)
        run = ask(app, "record", {"text": TEXT})[1]["run"]
        assert ask(app, "model")[1]["adapter"]
        recording = app._kept[run]
        found, names = faces(recording, "lora", head=7), Names(recording, 1, 7)
    if "out" in targets:
        close(found["out"], names.get("out"))
        close(found["wO"], names.get("wO"))
    assert ("wQ_A" in found) == ("q" in targets) and ("out" in found) == ("out" in targets)
    assert ("ffn" in found) == ("down" in targets)
    if "down" in targets:
        close(found["ffn"], names.get("ffn_out"))
    if "gate" in targets:
        assert "gate_A" in found
    for weight in ("wQ", "wK_t", "wV", "wO", "up", "down", "gate"):
        if f"{weight}_A" in found:
            close(found[weight], names.get(weight))
            base = Names(recording_of(MODELS[name]), 1, 7).get(weight)
            close(found[f"{weight}_base"], base)
            assert np.abs(found[weight] - base).max() > 0.1


def test_full_rank_factors_are_the_weights(recording: Recording) -> None:
    found, whole = faces(recording, "lora", rank=64), Names(recording, 1, 1)
    if min(whole.get("wK_t").shape) <= recording.config.head_width and recording.config.head_width <= min(
        whole.get("wV").shape
    ):
        close(found["wQ"], whole.get("wQ"))
    assert "wQ_A" in found and found["wQ_A"].shape[1] <= recording.config.head_width


def test_sliding_window_and_causality_of_maps() -> None:
    names = Names(recording_of(MODELS["qwen3_window_tied"]), 1, 0)
    map_TT = names.attention(0)
    assert (map_TT.triu(1) == 0).all() and (map_TT.tril(-5) == 0).all() and map_TT[10, 6] > 0
    assert names.get("heads").shape[0] == 12 * names.get("heads").shape[1]


def test_tiles_keep_values() -> None:
    x = np.random.default_rng(0).normal(size=(37, 53)) ** 3 * 1e4
    for parts, tolerance in ((1, 1e-3), (2, 1e-6)):
        back = decode_tile(encode_tile(x, parts))
        assert np.abs(back - x).max() <= tolerance * np.abs(x).max()
    small = reduce_tile(x, 8)
    assert small.shape == (5, 7) and np.abs(small).max() == np.abs(x).max()
    assert decode_tile(encode_tile(np.zeros((2, 3)), 1)).tolist() == np.zeros((2, 3)).tolist()
    with pytest.raises(RequestError, match="not finite"):
        encode_tile(np.array([[np.inf]]), 1)


def app(config: ModelConfig | None = None) -> LookApp:
    model = build(config or tiny.config(), dtype=torch.float32)
    return LookApp("tiny", model.config, tiny.tokenizer(), lambda tokens, pieces: record(model, tokens, pieces))


def ask(app: LookApp, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    name, _, query = path.partition("?")
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = app.answer(method or ("GET" if body is None else "POST"), name, query, raw)
    value = json.loads(answer.body) if answer.content_type == "application/json" else answer.body
    return answer.status, value


def test_questions_and_answers() -> None:
    here = app()
    status, model = ask(here, "model")
    assert status == 200 and model["pages"] == ["head", "heads", "layer", "decode", "lora"]
    status, found = ask(here, "record", {"text": TEXT})
    assert "".join(found["pieces"]) == TEXT
    run = found["run"]
    assert ask(here, "record", {"text": TEXT})[1]["run"] == run
    for page in model["pages"]:
        assert ask(here, f"scene?page={page}&run={run}&layer=1&head=2&rank=3")[0] == 200, page
    status, tile = ask(here, f"tensor?run={run}&layer=0&head=0&name=wQ&rows=2:9&cols=1:4&parts=2")
    assert status == 200 and decode_tile(tile).shape == (7, 3)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("record", b"{", "not JSON"),
        ("record", {"text": 1}, 'needs a "text"'),
        ("record", {"text": "x" * 20001}, "20,000"),
        ("record", {"text": "a"}, "1 tokens; send 2 to"),
        ("record", {"text": "fox " * 3000}, "send 2 to 128"),
        ("record", b"[" * 10**5, "not JSON"),
        ("record", b'{"text":"\\ud800"}', "surrogate"),
        ("scene?page=../x&run=RUN", None, "no page"),
        ("scene?page=head&run=RUN&layer=2", None, "no layer 2"),
        ("scene?page=head&run=RUN&head=6", None, "no head 6"),
        ("scene?page=head&run=RUN&head=-1", None, "no head"),
        ("scene?page=lora&run=RUN&rank=0", None, "below 1"),
        ("scene?page=routing&run=RUN", None, "no experts"),
        ("scene?page=cache&run=RUN", None, "running server"),
        ("scene?page=head&run=none", None, "record its text"),
        ("tensor?run=RUN&name=../../etc/passwd", None, "no tensor"),
        ("tensor?run=RUN&name=__class__", None, "no tensor"),
        ("tensor?run=RUN&name=input&rows=0:99999", None, "not a range"),
        ("tensor?run=RUN&name=input&rows=5:2", None, "not a range"),
        ("tensor?run=RUN&name=input&reduce=0", None, "reduce"),
        ("tensor?run=RUN&name=input&parts=3", None, "parts"),
        ("tensor?run=RUN&name=input&layer=1e9", None, "whole number"),
        ("tensor?run=RUN&name=input&layer=²", None, "whole number"),
        ("tensor?run=RUN", None, "missing"),
        ("tensor?run=RUN&run=RUN&name=input", None, "2 times"),
        ("tensor?run=RUN&name=wQ/A999&head=0", None, "not a factor"),
        ("tensor?run=RUN&name=input&layer=-1", None, "no layer"),
        ("tensor?" + "&".join(["a=1"] * 40), None, "malformed"),
        ("weights", None, "there is no GET"),
    ],
)
def test_hostile_questions(path: str, body: Any, message: str) -> None:
    here = app()
    run = ask(here, "record", {"text": TEXT})[1]["run"]
    status, answer = ask(here, path.replace("RUN", run), body)
    assert status in (400, 404)
    assert message in answer["error"]["message"]


def test_layouts_other_than_tp_are_refused() -> None:
    model = build(tiny.config(), dtype=torch.float32)
    assert record(model, [5, 6, 7], list("abc"), Plan()).run == record(model, [5, 6, 7], list("abc")).run
    with pytest.raises(RequestError, match="1 tokens"):
        record(model, [5], ["a"])
