"""`python -m decode_worker CONFIG_FILE`: one decode worker without a launcher."""

from cluster.role_process import main

if __name__ == "__main__":
    main("decode_worker.service:run")
