"""The table of an ablation as a page shows it, with bytes against KL."""

from __future__ import annotations

from quantmla.report.plots import frontier, method_name

SIZES = (("bytes_per_token", "the model's own sizes"), ("bytes_at_512_64", "512 + 64 channels"))


def show_ablation(ablation: dict) -> dict:
    """Return what the template needs: rows with names, plots, and how they were measured.

    Args: ablation [`ablation` of the result of `quantmla ablate`].
    Source: own.
    """
    return {
        **ablation,
        "rows": [{**row, "name": _name(row)} for row in ablation["rows"]],
        "plots": _plots(ablation["rows"]),
    }


def _name(row: dict) -> str:
    names = method_name(row["content"]), method_name(row["rope"])
    return names[0] if names[0] == names[1] else f"{names[0]} content, {names[1]} RoPE"


def _plots(rows: list[dict]) -> list[str]:
    """KL over bytes of a token, under the policy, at both sizes."""
    plots = []
    for field, size in SIZES:
        points: dict[str, list[tuple]] = {}
        for row in rows:
            if row["policy"] and row["promoted"] and row["valid"] and row["kl"] > 0:
                method = row["content"] if row["content"] == row["rope"] else "mixed"
                point = (row[field], row["kl"], f"{row['format']} {_name(row)}")
                points.setdefault(method, []).append(point)
        if points:
            title = f"Token KL to BF16 over bytes, {size}"
            plots.append(frontier(title, "bytes a token and layer", "nats", points))
    return plots
