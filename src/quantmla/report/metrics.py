"""The short form of results that other tools read: metrics.json."""

from __future__ import annotations


def metrics_of(rows: list[dict], manifest: dict) -> dict:
    """Bring fidelity rows into the form of metrics.json.

    Args: rows [fidelity rows of one or more window lengths]; manifest.
    Returns: {"bf16": {"ppl"}, "methods": [...], "manifest"}; BF16 is the absorbed one, KL and flips
        are those of the longest window, rows read are those of all of them.
    Source: own.
    """
    longest = max(row["window"] for row in rows)
    methods: dict[tuple[str, str], dict] = {}
    bf16: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["window"]):
        if row["attention"] == "expanded BF16":
            continue
        if row["attention"] == "absorbed BF16":
            bf16[str(row["window"])] = row["ppl"]
            continue
        entry = methods.setdefault(
            (row["method"], row["scheme"]),
            {
                "method": row["method"],
                "scheme": row["scheme"],
                "ppl": {},
                "kl": None,
                "top1_flips": None,
                "bytes_per_token": row["bytes_per_token"],
                "packed_rows_read": 0,
            },
        )
        entry["ppl"][str(row["window"])] = row["ppl"]
        entry["packed_rows_read"] += row["packed_rows_read"]
        if row["window"] == longest:
            entry |= {"kl": row["kl"], "top1_flips": row["top1_flips"]}
    return {"bf16": {"ppl": bf16}, "methods": list(methods.values()), "manifest": manifest}
