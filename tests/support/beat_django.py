"""Settings of a Django project that has nothing but django-celery-beat, in a file of its own."""

from __future__ import annotations

import os

SECRET_KEY = "of no use"
USE_TZ = True
TIME_ZONE = "UTC"
INSTALLED_APPS = ["django_celery_beat"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["BEAT_DATABASE"],
        # One that has read and goes on to write would not wait: it is refused at once.
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
