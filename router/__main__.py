"""`python -m router CONFIG_FILE`: this role in a process of its own, without the launcher."""

from cluster.role_process import main

if __name__ == "__main__":
    main("router.service:run")
