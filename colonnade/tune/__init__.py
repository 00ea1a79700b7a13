"""Fine-tuning on conversations, preferences, rewards and labels; upcycling, pruning and merging experts."""

from colonnade.tune.classify import Example, accuracy, classifier, fit
from colonnade.tune.expert_scores import ExpertScores, score_experts
from colonnade.tune.expert_subsets import keep_by_output
from colonnade.tune.merge_experts import merge_experts
from colonnade.tune.on_policy import OnPolicyFeed
from colonnade.tune.prune_experts import measure, prune
from colonnade.tune.to_dense import to_dense
from colonnade.tune.upcycle import upcycle

__all__ = [
    "Example",
    "ExpertScores",
    "OnPolicyFeed",
    "accuracy",
    "classifier",
    "fit",
    "keep_by_output",
    "measure",
    "merge_experts",
    "prune",
    "score_experts",
    "to_dense",
    "upcycle",
]
