"""``celery -A APP redlock web``: nodes, locks and refusals on a page; needs the extra ``web``."""
