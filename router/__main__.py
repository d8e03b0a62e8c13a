"""`python -m router CONFIG_FILE`: one router process; see `cluster.role_process`."""

from cluster.role_process import main

if __name__ == "__main__":
    main("router.service:run")
