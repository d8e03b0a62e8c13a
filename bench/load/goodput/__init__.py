"""The highest rate that meets the SLOs: a pure search, and what drives it."""
