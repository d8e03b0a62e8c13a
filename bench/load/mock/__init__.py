"""An OpenAI-compatible server of scripted timings and faults, to test load tests against."""
