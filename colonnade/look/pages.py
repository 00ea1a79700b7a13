"""Scenes and boards of a recording: the content of each page of the viewer.

A scene is the part of the viewer's state that depends on the model: an expression, sizes and tensors of its matrices,
epilogues, and the dimension letters by which a Plan shards them. The viewer computes every product itself, from the
tensors.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from colonnade.config import ModelConfig
from colonnade.errors import RequestError
from colonnade.look.expression import leaves, parse
from colonnade.look.lora import ATTENTION, FEED_FORWARD
from colonnade.look.recorder import Recording
from colonnade.look.routing_board import History, routing_board
from colonnade.look.tensors import Names
from colonnade.model.rotary import score_factor

Scene = dict[str, Any]
HEAD = "out = (attn = (Q = {input} @ {wQ}) @ (K_t = {wK_t} @ {input_t})) @ (V = {kv_input} @ {wV}) @ {wO}"


class _Builder:
    """Collects the leaves of a scene, with the sizes of their tensors."""

    def __init__(self, recording: Recording, layer: int, head: int):
        self.names = Names(recording, layer, head)
        self.recording, self.layer, self.head = recording, layer, head
        self.leaves: dict[str, Any] = {}
        self.letters: dict[str, list[str]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.positions: dict[str, list[int]] = {}
        """Leaves whose rows are some of the tokens, with the index of each row's token."""

    def leaf(self, name: str, tensor: str | None = None, letters: str = "") -> str:
        """Add the leaf ``name``, of the tensor of this or another name; returns ``name``."""
        rows, cols = self.names.get(tensor or name).shape
        ref = {"run": self.recording.run, "layer": self.layer, "head": self.head, "name": tensor or name}
        self.leaves[name] = {"rows": rows, "cols": cols, "tensor": ref}
        if letters:
            self.letters[name] = ["" if each == "-" else each for each in letters]
        return name

    def scene(self, expr: str, title: str, note: str, **more: Any) -> Scene:
        plan = {"tp": self.recording.plan.tp} if self.recording.plan.tp > 1 else {}
        return {
            "expr": expr, "leaves": self.leaves, "nodes": self.nodes, "letters": self.letters, "title": title,
            "note": note, "positions": self.positions, **({"plan": plan} if plan else {}), **more,
        }  # fmt: skip


def _check_head(config: ModelConfig, head: int) -> None:
    if not 0 <= head < config.heads:
        raise RequestError(f"there is no head {head}; this model has 0 to {config.heads - 1}", param="head")


def _attention_nodes(build: _Builder, *, recorded_q: str = "Q_recorded", rows: str = "") -> None:
    """Epilogues of Q, K_t, V and attn; values that no epilogue can compute are taken from the recording."""
    config, nodes = build.recording.config, build.nodes
    q: dict[str, Any] = {}
    k: dict[str, Any] = {}
    if config.latent is None:
        if config.qkv_bias:
            q["plus"], k["plus"] = build.leaf("bQ"), build.leaf("bK_t")
            nodes["V"] = {"plus": build.leaf("bV")}
        if config.qk_norm or config.qkv_clip is not None:
            q = {"recorded": build.leaf("Q_recorded", recorded_q)}
            k = {"recorded": build.leaf("K_t_recorded")}
            if config.qkv_clip is not None:
                nodes["V"] = {"recorded": build.leaf("V_recorded")}
        elif config.positions == "rotary":
            q |= {"cos": build.leaf(f"{rows}cos"), "sin": build.leaf(f"{rows}sin")}
            k |= {"cos": build.leaf("cos_t"), "sin": build.leaf("sin_t")}
    else:
        q |= {"cos": build.leaf(f"{rows}cos"), "sin": build.leaf(f"{rows}sin")}
    attn: dict[str, Any] = {"epilogue": "causal scaled softmax" if config.causal else "scaled softmax"}
    attn["scale"] = score_factor(config.rope_scaling if config.latent else None) / math.sqrt(config.head_width)
    if window := config.window_of(build.layer):
        attn["window"] = window
    nodes |= {"Q": q, "K_t": k, "attn": attn}
    for key in [key for key, node in nodes.items() if not node]:
        del nodes[key]


def _head_leaves(build: _Builder) -> dict[str, str]:
    latent = build.recording.config.latent
    names = {
        "input": build.leaf("input", letters="TD"), "wQ": build.leaf("wQ", letters="DH"),
        "wK_t": build.leaf("wK_t", letters="HD"), "wV": build.leaf("wV", letters="DH"),
        "wO": build.leaf("wO", letters="HD"),
    }  # fmt: skip
    if latent is None:
        return names | {"input_t": build.leaf("input_t", letters="DS"), "kv_input": "input"}
    if latent.q_rank:
        names["input"] = build.leaf("q_latent", letters="TD")
        del build.leaves["input"], build.letters["input"]
    return names | {
        "input_t": build.leaf("latent_t", letters="DS"), "kv_input": build.leaf("latent", letters="SD")
    }  # fmt: skip


def head_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:  # noqa: ARG001 - all pages have the same signature
    """An attention head with its own projections."""
    config = recording.config
    _check_head(config, head)
    build = _Builder(recording, layer, head)
    expr = HEAD.format(**_head_leaves(build))
    _attention_nodes(build)
    owner = (
        f" It is on tensor-parallel rank {head * recording.plan.tp // config.heads}." if recording.plan.tp > 1 else ""
    )
    share = f" {config.group} query heads share its keys and values." if config.group > 1 else ""
    computed = f"{len(recording.tokens)} tokens; every product is computed in this page from the model's own tensors."
    return build.scene(expr, f"Layer {layer}, head {head}", computed + share + owner, start="attn")


def decode_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:  # noqa: ARG001
    """The last token alone against the keys and values of all."""
    config = recording.config
    _check_head(config, head)
    build = _Builder(recording, layer, head)
    last = "Q_last" if config.latent else "last"
    k_t, v = build.leaf("K_t", "K_t_recorded", "HS"), build.leaf("V", "V_recorded", "SH")
    wo = build.leaf("wO", letters="HD")
    if config.latent:  # the query's own projection is on the head's page
        row = build.leaf("Q", last, "-H")
        expr = f"out = (attn = {row} @ {k_t}) @ {v} @ {wo}"
        build.nodes["attn"] = {"epilogue": "scaled softmax"}
    else:
        row, wq = build.leaf("input", "last", "-D"), build.leaf("wQ", letters="DH")
        expr = f"out = (attn = (Q = {row} @ {wq}) @ {k_t}) @ {v} @ {wo}"
        _attention_nodes(build, recorded_q="Q_last", rows="last_")
        for unused in ("K_t", "V"):
            build.nodes.pop(unused, None)
    build.positions[row] = [len(recording.tokens) - 1]
    note = f"One query row reads {len(recording.tokens)} cached keys and values."
    return build.scene(expr, f"Layer {layer}, head {head}: decoding one token", note, start="attn")


def _feed_forward(build: _Builder, x: str, weights: Mapping[str, str], names: tuple[str, str], expert: str = "") -> str:
    """The statements of a feed-forward part with the input ``x``; ``names`` are those of its hidden units and output.

    ``weights`` are expressions of up, down and gate; ``expert`` is the prefix of an expert's tensors.
    """
    config, (hidden, out) = build.recording.config, names
    nodes: dict[str, dict[str, Any]] = {hidden: {"times": "gated"} if config.gated else {"epilogue": config.activation}}
    if config.gated:
        nodes["gated"] = {"epilogue": config.activation}
    if config.ffn_bias:
        nodes.setdefault(out, {})
        for name, bias in ((hidden, "bup"), (out, "bdown"), ("gated", "bgate")):
            if name in nodes:
                nodes[name]["plus"] = build.leaf(bias, expert + bias)
    build.nodes |= nodes
    gate = f"gated = {x} @ {weights['gate']}; " if config.gated else ""
    return f"{gate}{out} = ({hidden} = {x} @ {weights['up']}) @ {weights['down']}"


def _ffn_weights(build: _Builder, expert: str = "") -> dict[str, str]:
    letters = {"up": "DF", "down": "FD"} | ({"gate": "DF"} if build.recording.config.gated else {})
    return {name: build.leaf(name, expert + name, each) for name, each in letters.items()}


def layer_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:  # noqa: ARG001
    """The projections and the feed-forward part of a whole layer, to scale."""
    config, build = recording.config, _Builder(recording, layer, head)
    statements: list[str] = []
    if config.latent is None:
        x = build.leaf("input", letters="TD")
        for part, letter in (("Q", "N"), ("K", "K"), ("V", "K")):
            statements.append(f"{part} = {x} @ {build.leaf(f'w{part}', f'w{part}_all', 'D' + letter)}")
            if config.qkv_bias:
                build.nodes[part] = {"plus": build.leaf(f"b{part}", f"b{part}_all")}
    statements.append(f"mha = {build.leaf('heads_out', letters='TN')} @ {build.leaf('wO', 'wO_all', 'ND')}")
    if config.out_bias:
        build.nodes["mha"] = {"plus": build.leaf("bO")}
    if config.experts_of(layer) is None:
        x = build.leaf("ffn_in", letters="TD")
        statements.append(_feed_forward(build, x, _ffn_weights(build), ("hidden", "ffn")))
    note = (
        "Projections of all heads, and the feed-forward part; before norms of queries and keys, and rotary positions."
    )
    return build.scene("; ".join(statements), f"Layer {layer} to scale", note)


def experts_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:  # noqa: ARG001
    """One expert and the tokens that chose it; ``head`` is the expert's number."""
    moe = recording.config.experts_of(layer)
    if moe is None:
        raise RequestError(f"layer {layer} has no experts; choose another layer", param="layer")
    if not 0 <= head < moe.experts:
        raise RequestError(f"there is no expert {head}; this layer has 0 to {moe.experts - 1}", param="head")
    build = _Builder(recording, layer, head)
    rows = build.names.rows_of_expert().tolist()
    chosen, count = build.names.choices_of_expert(), len(recording.tokens)
    dropped = f" {len(rows)} kept and {chosen - len(rows)} dropped by the expert's capacity." if moe.capacity else ""
    if not rows:
        raise RequestError(
            f"expert {head} of layer {layer} has no token of this text: {chosen} of {count} tokens chose it.{dropped} "
            "Choose another; the routing page shows the load of each",
            param="head",
        )
    x = build.leaf("x", "expert_in", "TD")
    build.positions[x] = rows
    expr = _feed_forward(build, x, _ffn_weights(build, "expert_"), ("h", "y"), "expert_")
    note = f"{chosen} of {count} tokens chose this expert.{dropped} The router's weights are applied afterwards."
    return build.scene(expr, f"Layer {layer}, expert {head}", note)


def lora_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:
    """The adapter's factors in a head and the feed-forward part; without an adapter, the weights' best factors."""
    _check_head(recording.config, head)
    build = _Builder(recording, layer, head)
    adapted = [*build.names.adapted]
    if recording.adapter is None:
        return _low_rank_page(build, rank)
    lora = recording.adapter.model.lora
    assert lora is not None
    statements: list[str] = []

    def factors(name: str) -> str:
        before, after = build.letters.pop(name)
        pair = f"{build.leaf(f'{name}_A', letters=f'{before}R')} @ {build.leaf(f'{name}_B', letters=f'R{after}')}"
        build.nodes[name] = {"plus": build.leaf(f"{name}_base")}
        build.leaves.pop(name, None)
        return f"({name} = {pair})"

    if attention := [name for name in adapted if name in ATTENTION]:
        names = _head_leaves(build)
        for weight in attention:
            names[weight] = factors(weight)
        statements.append(HEAD.format(**names))
        _attention_nodes(build)
    if ffn := [name for name in adapted if name in FEED_FORWARD]:
        x = build.leaf("ffn_in", letters="TD")
        weights = {name: factors(name) if name in ffn else name for name in _ffn_weights(build)}
        statements.append(_feed_forward(build, x, weights, ("hidden", "ffn")))
    if not statements:
        raise RequestError(
            f"the adapter changes neither attention nor a dense feed-forward part of layer {layer}; choose another",
            param="layer",
        )
    title = f"Layer {layer}, head {head} with an adapter of rank {lora.rank}"
    note = (
        f"Targets {', '.join(lora.targets)}. Each adapted matrix is base + A @ B, with B times alpha / rank = "
        f"{lora.scale:g}; without the base, A @ B is what fine-tuning changed."
    )
    return build.scene("; ".join(statements), title, note, **({"start": "attn"} if attention else {}))


def _low_rank_page(build: _Builder, rank: int) -> Scene:
    config, layer, head = build.recording.config, build.layer, build.names.head
    names = _head_leaves(build)
    rank = min(rank, config.head_width, *(min(build.names.get(w).shape) for w in ATTENTION))
    for weight in ATTENTION:
        before, after = build.letters[weight]
        a = build.leaf(f"{weight}_A", f"{weight}/A{rank}", f"{before}R")
        b = build.leaf(f"{weight}_B", f"{weight}/B{rank}", f"R{after}")
        names[weight] = f"({weight} = {a} @ {b})"
        del build.leaves[weight], build.letters[weight]
    _attention_nodes(build)
    for key in ("Q", "K_t", "V"):  # what was recorded is of the whole weights
        if "recorded" in build.nodes.get(key, {}):
            del build.nodes[key]
    used = {leaf.name for tree in parse(HEAD.format(**names)) for leaf in leaves(tree)}
    extra = {node[field] for node in build.nodes.values() for field in ("plus", "cos", "sin") if field in node}
    build.leaves = {name: leaf for name, leaf in build.leaves.items() if name in used | extra}
    note = (
        f"This model has no adapter: each weight is replaced by its best approximation of rank {rank}. To see an "
        "adapter's own factors: colonnade look ADAPTER."
    )
    title = f"Layer {layer}, head {head} with factors of rank {rank}"
    return build.scene(HEAD.format(**names), title, note, start="attn")


def heads_page(recording: Recording, layer: int, head: int, rank: int) -> Scene:  # noqa: ARG001
    """The attention of all heads of all layers."""
    config = recording.config
    return {
        "run": recording.run, "layers": config.layers, "heads": config.heads, "title": "All heads",
        "note": f"{config.layers} layers of {config.heads} heads over {len(recording.tokens)} tokens.",
    }  # fmt: skip


PAGES: Mapping[str, Callable[[Recording, int, int, int], Scene]] = {
    "head": head_page, "heads": heads_page, "layer": layer_page, "experts": experts_page, "decode": decode_page,
    "lora": lora_page,
}  # fmt: skip


def pages_of(config: ModelConfig) -> list[str]:
    """The pages that a model of ``config`` has."""
    return [page for page in PAGES if config.moe is not None or page != "experts"] + ["routing"] * (
        config.moe is not None
    )


def make_page(
    recording: Recording, page: str, layer: int, head: int, rank: int, history: History = MappingProxyType({})
) -> Scene:
    """The scene or board ``page``; ``history`` is the routing of a training run.

    Raises :class:`RequestError` for what the model does not have.
    """
    if page == "routing":
        return routing_board(recording, history)
    if page not in PAGES:
        raise RequestError(f"there is no page '{page[:40]}'; use one of {', '.join(PAGES)}, routing", param="page")
    if not 0 <= layer < recording.config.layers:
        raise RequestError(
            f"there is no layer {layer}; this model has 0 to {recording.config.layers - 1}", param="layer"
        )
    if rank < 1:
        raise RequestError(f"rank={rank} is below 1; use 1 or more", param="rank")
    return PAGES[page](recording, layer, head, rank)
