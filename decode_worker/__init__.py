"""The decode role: grants leases on its KV pool, takes prompts in, decodes them in a continuous batch."""
