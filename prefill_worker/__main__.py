"""`python -m prefill_worker CONFIG_FILE`: one prefill worker without a launcher."""

from cluster.role_process import main

if __name__ == "__main__":
    main("prefill_worker.service:run")
