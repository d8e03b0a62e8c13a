"""Result files: written, read, compared, told in a few lines."""
