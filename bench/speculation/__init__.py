"""What drafts bring, by the kind of text; see `__main__`."""
