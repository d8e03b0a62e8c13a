"""A pool of workers that serve a trace in virtual time, step by step, under a policy."""
