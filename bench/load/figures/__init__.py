"""From records to figures: latencies, SLOs, windows, validity. Pure."""
