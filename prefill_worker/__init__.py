"""The prefill role: computes prompts in chunks, samples token 0, ships KV blocks while it computes."""
