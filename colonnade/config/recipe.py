"""How a corpus is cleaned (:mod:`colonnade.data.refine`); the recipe ``megatron`` is section 4.1 of Shoeybi 2019."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from colonnade.config.base import Config, did_you_mean
from colonnade.errors import ConfigError

Filter = Literal["gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality"]


class Recipe(Config):
    """What is repaired, and which documents are removed; the defaults are those of the recipe ``megatron``."""

    mend: bool = True
    """Repair wrongly decoded characters (ftfy) and join lines that are broken inside a sentence."""
    language: str = ""
    """Keep only documents in this language (a code such as en, by py3langid); empty: all languages."""
    min_tokens: int = 128
    """Remove documents with fewer tokens of the given tokenizer; without one, words and punctuation marks."""
    filters: tuple[Filter, ...] = ()
    """datatrove's filters to apply, by name."""
    title_field: str = "title"
    """JSONL field or column with the title of a document."""
    drop_titles: str = ""
    """A text file with one title per line; documents with these titles are removed."""
    drop_sources: tuple[str, ...] = ()
    """Patterns of source names (``books*``): these sources are excluded."""
    prefer: tuple[str, ...] = ()
    """Patterns of source names, best first: of two copies the one from the earlier pattern stays."""
    exact: bool = True
    """Remove documents whose normalised text (case, white space) occurs before."""
    similarity: float = 0.7
    """Remove documents with a higher Jaccard similarity of 5-grams to one that stays; 1 keeps all."""
    bands: int = 25
    """Bands of the MinHash signature."""
    rows: int = 5
    """Hashes in a band."""
    ngram: int = 13
    """Words of the n-grams that are cut out where they occur in evaluation texts."""
    margin: int = 200
    """Characters cut on each side of such an n-gram, and minimum length of a piece that is kept [characters]."""
    max_pieces: int = 10
    """Documents that would be cut into more pieces are removed."""
    common: int = 10
    """n-grams of evaluation texts seen this often in the corpus are common, and are kept."""

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        for name, low, high in (
            ("min_tokens", 0, 1 << 20), ("bands", 1, 1000), ("rows", 1, 100), ("ngram", 8, 100),
            ("margin", 0, 1 << 20), ("max_pieces", 1, 1 << 20), ("common", 1, 1 << 40),
        ):  # fmt: skip
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"Recipe.{name} is {value}; it must be from {low:,} to {high:,}")
        if not 0 < self.similarity <= 1:
            raise ConfigError(f"Recipe.similarity is {self.similarity}; it must be in (0, 1], 0.7 in Megatron-LM")
        return self


RECIPES: dict[str, Recipe] = {"megatron": Recipe()}
"""Recipes by name."""


def read_recipe(name: str) -> Recipe:
    """The recipe of that name, or of that TOML file; raises :class:`ConfigError` if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    if not (Path(name).suffix == ".toml" or Path(name).is_file()):
        raise ConfigError(
            f"there is no recipe '{name}'{did_you_mean(name, list(RECIPES))}; or use a TOML file with the keys of "
            "Recipe"
        )
    from colonnade.config.toml import read

    return read(Recipe, Path(name))
