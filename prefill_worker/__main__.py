"""`python -m prefill_worker`: one prefill worker, by hand or for a launcher; `--help` says how."""

from cluster.role_cli import main

if __name__ == "__main__":
    main("prefill_worker.service:run")
