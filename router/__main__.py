"""`python -m router`: one router, by hand or for a launcher; `--help` says how."""

from cluster.role_cli import main

if __name__ == "__main__":
    main("router.service:run")
