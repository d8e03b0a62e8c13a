"""The report of a load test: one self-contained HTML page (`page.render_report`)."""

from bench.load.report.page import render_report
from bench.load.report.values import ReportRun, ReportSearch

__all__ = ["ReportRun", "ReportSearch", "render_report"]
