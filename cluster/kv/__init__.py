"""Paged KV: its layout, who owns which block, what is cached, and how blocks move between workers."""
