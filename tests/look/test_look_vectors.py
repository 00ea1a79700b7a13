"""The viewer's rules in Python equal the vectors that the TypeScript tests read."""

import json

import numpy as np
import pytest

from colonnade.look.expression import ExpressionError, parse
from colonnade.look.values import evaluate
from tests.look import vectors

SHARED = json.loads(vectors.FILE.read_text())


@pytest.mark.parametrize("part", ["expressions", "blocks", "plans", "shape_errors"])
def test_vectors_are_of_this_code(part: str) -> None:
    assert json.loads(json.dumps(vectors.all_vectors()[part])) == SHARED[part]


def test_values_are_of_this_code() -> None:
    for case, shared in zip(vectors.VALUES, SHARED["values"], strict=True):
        faces = evaluate(parse(case["expr"]), case["leaves"], case["nodes"])
        for key, face in faces.items():
            np.testing.assert_allclose(face.ravel(), shared["faces"][key], rtol=1e-6, atol=1e-7)


def test_errors_name_the_position_and_the_remedy() -> None:
    with pytest.raises(
        ExpressionError, match=r"expected a name or '\(', not '@' \(at character 4\); an expression"
    ) as error:
        parse("A @ @ B")
    assert error.value.position == 4


def test_megatron_rule() -> None:
    """Splitting the second product's k splits the first one's columns and the second weight's rows."""
    blocks = {case["expr"]: case["blocks"] for case in SHARED["blocks"]}["y = (h = x @ up) @ down"]
    assert blocks == {"y": [2, 1], "h": [2, 4], "x": [2, 1], "up": [1, 4], "down": [4, 1]}
    plans = [case for case in SHARED["plans"] if case["plan"] == {"tp": 4}]
    assert plans[0]["summed"] == {"y": 4}
