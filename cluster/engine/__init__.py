"""The model: its description, weights, decoder, sampler, and the runner that executes one packed step."""
