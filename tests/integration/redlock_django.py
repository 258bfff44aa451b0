"""
A Django project whose database keeps the locks, run by test_django_tables.py.

    python redlock_django.py DATABASES COMMAND ...    as manage.py COMMAND ...
"""

from __future__ import annotations

import json
import os
import sys

from django.conf import settings
from django.core.management import execute_from_command_line

DATABASES, *COMMAND = sys.argv[1:]
settings.configure(
    DATABASES=json.loads(DATABASES),
    INSTALLED_APPS=["celery_redlock.django"],
    USE_TZ=True,
    **json.loads(os.environ.get("SETTINGS", "{}")),
)
execute_from_command_line(["manage.py", *COMMAND])
