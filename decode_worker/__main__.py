"""`python -m decode_worker`: one decode worker, by hand or for a launcher; `--help` says how."""

from cluster.role_cli import main

if __name__ == "__main__":
    main("decode_worker.service:run")
