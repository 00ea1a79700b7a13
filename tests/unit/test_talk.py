"""What is said before a model with experts that count tokens serves."""

from colonnade.config import MoeConfig, RouterConfig
from colonnade.talk import company
from tests.serve import tiny


def test_who_has_no_place_for_all_is_told() -> None:
    for capacity in (None, 0):
        assert company(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=capacity))) == ""
    assert company(tiny.config()) == ""
    said = company(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=1.25)))
    assert said.startswith("note: experts with a capacity (factor 1.25)")
    assert said.endswith("--experts.capacity off gives each one")
    chosen = MoeConfig(experts=4, ffn_width=8, capacity=1, router=RouterConfig(kind="expert_choice"))
    assert "chose among whole texts" in company(tiny.config(moe=chosen))
