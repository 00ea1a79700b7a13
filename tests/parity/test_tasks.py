"""Task-based routing, trained on documents with task labels: any plan gives the same run."""

from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.config import (
    DataConfig,
    ExpertsConfig,
    ModelConfig,
    MoeConfig,
    Plan,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.train import Trainer
from colonnade.train.data_feed import CorpusFeed
from colonnade.train.loop import train
from colonnade.train.trackers import ROUTING, read_rows
from tests.corpora import TEXT, small
from tests.worlds import assert_same
from tests.worlds import run as in_world

MOE = MoeConfig(
    experts=4,
    active=1,
    ffn_width=12,
    first_k_dense_replace=1,
    balance_weight=0.1,
    router=RouterConfig(kind="task", tasks=4, noise=0.5),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks whose documents differ in words and lengths."""
    folder, words = tmp_path_factory.mktemp("data"), TEXT.split()
    sources = []
    for task in range(3):
        file = folder / f"{task}.txt"
        texts = [" ".join(words[(i * j + task) % len(words)] for j in range(4 + task + i % 20)) for i in range(40)]
        file.write_text("\n\n".join(texts))
        sources.append(file)
    build(sources, folder / "corpus", vocab_size=300, validation_share=0.2, separator="\n\n", tasks="source")
    return folder / "corpus"


def config(corpus: Path, runs: Path, **train: object) -> RunConfig:
    vocab_size = Corpus(corpus).manifest.vocab_size
    model = ModelConfig(vocab_size=vocab_size, layers=3, width=16, heads=4, ffn_width=20, context=32, moe=MOE)
    settings = TrainConfig(
        steps=4, batch=8, micro_batch=4, lr=1e-2, min_lr=1e-3, warmup=0, weight_decay=0.0, dtype="float64",
        eval_every=4, eval_samples=5, save_every=0,
    )  # fmt: skip
    return RunConfig(
        name="it", runs=runs, device="cpu", model=model, data=DataConfig(path=corpus, sequence=16),
        train=settings.replace(**train),
    )  # fmt: skip


def history(run: RunConfig) -> list[float]:
    return [row[key] for row in read_rows(run.folder) for key in ("loss", "grad_norm", "validation_loss") if key in row]


@pytest.mark.slow
def test_any_plan_gives_the_same_run(corpus: Path, tmp_path: Path) -> None:
    """Two layouts: with a context ring and with a pipeline."""
    alone = config(corpus, tmp_path / "alone", log_every=1)
    Trainer(alone).fit()
    expected = colonnade.load(alone.folder, device="cpu", dtype="float64").transformer.state_dict()
    for plan in (Plan(tp=2, cp=2, ep=2, etp=2), Plan(pp=2, dp=2, ep=2, schedule="gpipe")):
        leg = alone.train.replace(micro_batch=4 // plan.data_ranks)
        several = alone.replace(plan=plan, runs=tmp_path / f"{plan.pp}-{plan.cp}-{plan.dp}", train=leg)
        in_world(plan.world, train, several)
        assert history(several) == pytest.approx(history(alone), rel=1e-9)
        found = colonnade.load(several.folder, device="cpu", dtype="float64").transformer.state_dict()
        for name, x in expected.items():
            assert_same(found[name], x, 1e-9, f"{plan}: {name}")


def test_task_updates_only_its_own_row(corpus: Path, tmp_path: Path) -> None:
    """The fourth task has no documents; all tokens of a task go to one expert."""
    run = config(corpus, tmp_path, log_every=1)
    run = run.replace(model=run.model.replace(moe=MOE.replace(router=RouterConfig(kind="task", tasks=4))))
    Trainer(run).fit()
    found = colonnade.load(run.folder, device="cpu", dtype="float64").transformer
    before = initialise(Transformer(run.model, dtype=torch.float64), run.train.seed)
    for layer in (1, 2):
        name = f"blocks.{layer}.ffn.router.gates.0.own.table"
        moved = (found.get_parameter(name) - before.get_parameter(name)).abs().amax(1) > 1e-6
        assert moved.tolist() == [True, True, True, False]
    split = Corpus(corpus).split("train")
    for row in read_rows(run.folder, ROUTING):
        assert sum(n > 0 for n in row["1"]["load"]) <= 3
    table = found.get_parameter("blocks.1.ffn.router.gates.0.own.table")
    with (
        pytest.raises(ConfigError, match=r"one of 4 tasks.* set --experts\.task to one of 0 to 3"),
        colonnade.load(run.folder, device="cpu") as untold,
    ):
        colonnade.Engine(untold)
    with pytest.raises(ConfigError, match=r"no task is called '4'; set --experts\.task to one of 0 \(.*0\.txt\), 1 \("):
        colonnade.load(run.folder, device="cpu", experts=ExpertsConfig(task="4"))
    tasks = Corpus(corpus).manifest.tasks
    assert tasks is not None
    for task in range(3):
        at = int((split.tasks(0, split.tokens) == task).argmax())
        tokens = split.read(at, at + 3).tolist()
        # By number, by file name with its folder, or by file name without folder and suffix.
        task_setting = (task, tasks[task], str(task))[task]
        it = colonnade.load(run.folder, device="cpu", dtype="float64", experts=ExpertsConfig(task=task_setting))
        assert it.config.moe is not None
        assert it.config.moe.router.task == task
        chosen = int(table[task].argmax())
        with torch.no_grad():
            expected = it.logits(tokens)
            for e in range(4):
                if e != chosen:
                    it.transformer.get_parameter("blocks.1.ffn.experts.up")[e] = torch.nan
            assert torch.equal(it.logits(tokens), expected), "the other experts are not used"


def test_corpus_with_unsuitable_tasks_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path)
    few = run.replace(model=run.model.replace(moe=MOE.replace(router=RouterConfig(kind="task", tasks=2))))
    with pytest.raises(ConfigError, match=r"has 3 tasks and the router 2; set --model\.moe\.router\.tasks 3"):
        CorpusFeed(few)
    plain = small(tmp_path / "plain")
    without_tasks = run.replace(data=DataConfig(path=plain, sequence=16))
    with pytest.raises(ConfigError, match="colonnade corpus FILES --tasks source"):
        CorpusFeed(without_tasks)
    CorpusFeed(
        without_tasks.replace(
            model=run.model.replace(moe=MOE.replace(router=RouterConfig(kind="task", tasks=4, task=1)))
        )
    )
    with pytest.raises(ConfigError, match="groups tokens by task, and balance 'sequence' groups them by sequence"):
        CorpusFeed(run.replace(model=run.model.replace(moe=MOE.replace(balance="sequence"))))
