"""Fleets of thousands of workers in virtual time: cells side by side, in bounded memory, on several cores."""
