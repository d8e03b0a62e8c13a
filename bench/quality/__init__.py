"""What quantization costs in quality: `python -m bench.quality`."""
