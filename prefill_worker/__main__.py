"""`python -m prefill_worker CONFIG_FILE`: this role in a process of its own, without the launcher."""

from cluster.role_process import main

if __name__ == "__main__":
    main("prefill_worker.service:run")
