"""
The lock around a Celery task.

`base` has `RedlockTask`; Celery publishes it by `publish` and calls it by `calls`. `execution`
follows one execution straight down. `task_lock` is what a task asks of its lock: `keys` makes the
lock name, `options` and `policies` say what the task wants. `refused` does what a policy says,
`redelivery` brings a task back later, `interrupt` tells a running body that its lock is lost,
`current` is what the body sees. `protection` bases tasks on `RedlockTask` that `redlock_protect`
names, by its `patterns`.
"""
