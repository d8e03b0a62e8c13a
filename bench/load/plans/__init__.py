"""When and what is offered: settings in, a plan out."""
