from quantmla.report import metrics_of


def test_metrics_take_kl_of_the_longest_window():
    row = {
        "method": "rtn",
        "scheme": "c4r4",
        "attention": "absorbed quantised",
        "bytes_per_token": 30,
        "packed_rows_read": 5,
    }
    rows = [
        row | {"window": 2048, "ppl": 2.0, "kl": 0.2, "top1_flips": 0.02},
        row | {"window": 512, "ppl": 1.0, "kl": 0.1, "top1_flips": 0.01},
        row | {"method": "bf16", "attention": "absorbed BF16", "window": 512, "ppl": 0.5},
        row | {"method": "bf16", "attention": "expanded BF16", "window": 512, "ppl": 0.4},
    ]
    metrics = metrics_of(rows, {})
    assert metrics["bf16"] == {"ppl": {"512": 0.5}}
    (entry,) = metrics["methods"]
    assert entry["ppl"] == {"512": 1.0, "2048": 2.0}
    assert (entry["kl"], entry["top1_flips"], entry["packed_rows_read"]) == (0.2, 0.02, 10)
