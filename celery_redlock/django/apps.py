"""The app, by the name that Django looks for."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig

__all__ = ["RedlockConfig"]


class RedlockConfig(AppConfig):  # type: ignore[misc]  # Django comes without types
    """Has no models: what is in the tables is ours, and changes too often for any of Django's."""

    name = "celery_redlock.django"
    label = "celery_redlock"
    verbose_name = "Locks of Celery tasks"
    default_auto_field: Any = "django.db.models.BigAutoField"
