"""``python -m celery_redlock`` is ``celery-redlock``."""

from __future__ import annotations

from celery_redlock.ops.main import main

if __name__ == "__main__":
    main(prog_name="python -m celery_redlock")
