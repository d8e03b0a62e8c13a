"""Offers a plan to a server and brings back one record per request."""
