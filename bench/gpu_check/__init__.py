"""One run that shows on a GPU, or in Triton's interpreter, whether the GPU path is right and how fast."""
