"""The Django project that keeps results."""

from __future__ import annotations

import os

SECRET_KEY = "not one, as nothing is signed"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django_celery_results"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DATABASE"],
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
}
