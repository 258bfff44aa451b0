"""Import of an app's modules and tasks, as a worker does it."""

from __future__ import annotations

from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.ops.text import one_line

__all__ = ["AppError", "load_tasks"]

#: So many characters of an app's error are shown.
TOLD = 300


class AppError(ConfigurationError):
    """The app's own code raised an error while it was loaded."""

    @classmethod
    def of(cls, error: Exception) -> AppError:
        return cls(f"The app could not be loaded: {type(error).__name__}: {one_line(error, TOLD)}")


def load_tasks(app: Any) -> None:
    """
    Have *app* know all the tasks that a worker would know.

    Raises:
        ConfigurationError: The options of a task, or a setting of ours, are invalid.
        AppError: A module of the app's could not be imported, or its code raised.
    """
    try:
        app.loader.import_default_modules()
        app.finalize()
    except ConfigurationError:
        raise
    except Exception as error:
        raise AppError.of(error) from error
