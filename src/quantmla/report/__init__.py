"""One self-contained HTML page, and metrics.json, from result rows; reads JSON data only."""

from quantmla.report.metrics import metrics_of
from quantmla.report.page import require_packages, write_report

__all__ = ["metrics_of", "require_packages", "write_report"]
