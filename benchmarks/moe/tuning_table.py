"""Merging and formatting of the experts' tile table (tiles.json)."""

import json
from typing import Any

from colonnade.kernels.experts.tiles import GroupedTiles


def merge_tables(record: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The table, with shapes replaced or added by those of ``parts``."""
    shapes = {(s["E"], s["F"], s["D"]): s for s in record["shapes"]}
    for part in parts:
        shapes |= {(s["E"], s["F"], s["D"]): s for s in part["shapes"]}
    devices = {part["measured_on"] for part in (record, *parts)} - {"none"}
    found = {"measured_on": ", ".join(sorted(devices)) or "none", "shapes": [shapes[key] for key in sorted(shapes)]}
    return found | {"kernels": record["kernels"]}


def table_json(record: dict[str, Any]) -> str:
    """The table as JSON text, a row's tiles on one line, without default values."""
    defaults = GroupedTiles(0, 0, 0, 0, 0)._asdict()

    def line(row: dict[str, Any]) -> str:
        how = {key: value for key, value in row["tiles"].items() if value != defaults[key] or key == "GROUP"}
        return f'{{"rows_an_expert": {json.dumps(row["rows_an_expert"])}, "tiles": {json.dumps(how)}}}'

    def kernels(found: dict[str, Any], indent: str) -> str:
        parts = [
            f'{indent}"{kernel}": [\n' + ",\n".join(f"{indent}  {line(row)}" for row in rows) + f"\n{indent}]"
            for kernel, rows in found.items()
        ]
        return "{\n" + ",\n".join(parts) + f"\n{indent[:-2]}}}"

    shapes = [
        f'    {{"E": {s["E"]}, "F": {s["F"]}, "D": {s["D"]}, "kernels": ' + kernels(s["kernels"], " " * 6) + "}"
        for s in record["shapes"]
    ]
    parts = [
        f'"measured_on": {json.dumps(record["measured_on"])}',
        '"shapes": ' + ("[\n" + ",\n".join(shapes) + "\n  ]" if shapes else "[]"),
        '"kernels": ' + kernels(record["kernels"], "    "),
    ]
    return "{\n  " + ",\n  ".join(parts) + "\n}\n"
