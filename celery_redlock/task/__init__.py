"""
The lock around a Celery task.

`execution` holds `RedlockTask` and follows one execution straight down; `keys` makes the
lock name, `options` and `policies` say what a task wants, `refused` does what a policy
says, `redelivery` brings a task back later, `interrupt` tells a running body that its
lock is lost, `current` is what the body sees.
"""
