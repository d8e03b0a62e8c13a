"""The whole cluster in virtual time: live conductor, cores and block managers, the rest modelled."""
