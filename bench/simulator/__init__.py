"""The whole cluster in virtual time: the live conductor, cores and block managers, everything else modelled."""
