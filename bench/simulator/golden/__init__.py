"""What DistServe's simulator says of OPT-13B, and what ours says of the same."""
