"""
A Django app whose migration makes the tables of a database that keeps the locks.

    INSTALLED_APPS = ["celery_redlock.django", ...]
    REDLOCK_DATABASE = "default"        # alias of the database that redlock_nodes names
    REDLOCK_TABLE = "celery_redlock"    # or "schema.table", as in ?schema= and ?table= of its URL

Both settings have these defaults. `celery -A APP redlock init` does the same without Django.
"""
